"""A transformers model over a pool of cells: loading, attention, packed forwards, sampling."""
