"""The reading pattern: segments, prompts, the reader that writes margins, and its events."""
