"""What people run instead, on the same workload: transformers, or any server with a prefix cache.

`Transformers` writes margins one after the other over a `DynamicCache`, as the public
implementation of Writing in the Margins does. `Server` speaks the OpenAI completions API: every
margin is a request of its own, and the server's prefix cache keeps it from prefilling twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from postil.bench.margins import System, Timing
from postil.bench.workload import QUESTION
from postil.engine.loading import Loaded
from postil.errors import BackendError
from postil.margins.prompts import Prompts

TIMEOUT_SECONDS = 3600.0


def peers(names: Sequence[str], load: Callable[[], Loaded]) -> list[System]:
    """The systems of `--compare`: `transformers`, or the address of a server with /v1.

    Args:
        load: loads the model as transformers made it.

    Raises:
        BackendError: a server does not answer.
        ValueError: a name is neither.
    """
    for name in names:
        if name != "transformers" and not name.startswith(("http://", "https://")):
            raise ValueError(f"--compare takes transformers or the URL of a server, not {name!r}")
    found: list[System] = []
    for name in names:
        if name == "transformers":
            found.append(Transformers(load()))
        else:
            prompts = Prompts(load().tokenizer)
            found += [Server(name, prompts, overlap=overlap) for overlap in (False, True)]
    return found


class Transformers:
    """transformers' own cache and attention, one step after the other.

    Args:
        loaded: with weights as transformers keeps them; the engine cannot use it afterwards.
    """

    name = "transformers"

    def __init__(self, loaded: Loaded) -> None:
        self._network = loaded.network
        self._network.set_attn_implementation("sdpa")
        self._argument = loaded.cache_argument
        self._device = loaded.device
        self._extract = Prompts(loaded.tokenizer).extract(QUESTION)

    def plain(self, segments: list[list[int]]) -> float:
        start, cache = time.perf_counter(), DynamicCache()
        for tokens in segments:
            self._next(tokens, cache)
        return time.perf_counter() - start

    def margins(self, segments: list[list[int]], margin_tokens: int) -> Timing:
        start, cache, first = time.perf_counter(), DynamicCache(), 0.0
        for tokens in segments:
            self._next(tokens, cache)
            token = self._next(self._extract, cache)
            for _ in range(margin_tokens - 1):
                token = self._next([token], cache)
            cache.crop(-(len(self._extract) + margin_tokens - 1))
            first = first or time.perf_counter() - start
        return Timing(time.perf_counter() - start, first)

    def decode(self, prompt: list[int], tokens: int) -> float:
        """Seconds that `generate` takes for so many tokens behind a prompt that it has read."""
        ids, cache = torch.tensor([prompt], device=self._device), DynamicCache()
        self._next(prompt[:-1], cache)
        given: dict[str, Any] = {self._argument: cache}
        start = time.perf_counter()
        # Its own end-of-text is not to stop it: as many tokens as we write.
        self._network.generate(
            input_ids=ids,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            **given,
        )
        return time.perf_counter() - start

    @torch.inference_mode()
    def _next(self, tokens: list[int], cache: DynamicCache) -> int:
        """Feed tokens; the likeliest next one."""
        ids = torch.tensor([tokens], device=self._device)
        given: dict[str, Any] = {self._argument: cache}
        logits = self._network(input_ids=ids, use_cache=True, logits_to_keep=1, **given).logits
        return int(logits[0, -1].argmax())


class Server:
    """A server with a prefix cache, at an address that ends in /v1.

    Args:
        overlap: send each request at the first token of the last, instead of at its end.

    Raises:
        BackendError: nothing answers there.
    """

    def __init__(self, url: str, prompts: Prompts, *, overlap: bool) -> None:
        self.name = f"{url}, {'overlapped' if overlap else 'one after the other'}"
        self._url, self._overlap = url.rstrip("/"), overlap
        self._extract = prompts.extract(QUESTION)
        import httpx

        try:
            models = httpx.get(f"{self._url}/models", timeout=10).raise_for_status().json()
            self._model = models["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise BackendError(
                f"No OpenAI-compatible server answers at {url} ({error}): start one that serves "
                "the same model, and give its address up to /v1"
            ) from error

    def plain(self, segments: list[list[int]]) -> float:
        async def read(client: Any) -> None:
            await self._complete(client, [t for tokens in segments for t in tokens], 1)

        return self._timed(read)[0]

    def margins(self, segments: list[list[int]], margin_tokens: int) -> Timing:
        ended: list[float] = []

        async def read(client: Any) -> None:
            document: list[int] = []
            tasks = []
            for tokens in segments:
                document = [*document, *tokens]
                prompt, begun = [*document, *self._extract], asyncio.Event()

                async def margin(prompt: list[int] = prompt, begun: asyncio.Event = begun) -> None:
                    await self._complete(client, prompt, margin_tokens, begun)
                    ended.append(time.perf_counter())

                tasks.append(asyncio.create_task(margin()))
                # A request that fails never begins: `gather` below says why.
                waiting = asyncio.create_task(begun.wait())
                await asyncio.wait({waiting, tasks[-1]}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if not self._overlap:
                    await tasks[-1]
            await asyncio.gather(*tasks)

        seconds, start = self._timed(read)
        return Timing(seconds, min(ended) - start)

    def _timed(self, work: Any) -> tuple[float, float]:
        """Seconds, and when they began."""
        import httpx

        async def run() -> tuple[float, float]:
            # llama-server drops idle connections, so none is used twice.
            limits = httpx.Limits(max_keepalive_connections=0)
            async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, limits=limits) as client:
                start = time.perf_counter()
                await work(client)
                return time.perf_counter() - start, start

        try:
            return asyncio.run(run())
        except httpx.HTTPError as error:
            raise BackendError(
                f"The server at {self._url} failed ({error}): see its own log"
            ) from error

    async def _complete(
        self, client: Any, tokens: list[int], length: int, begun: asyncio.Event | None = None
    ) -> None:
        body = {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": length,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "cache_prompt": True,  # llama-server's word; others do it unasked
        }
        async with client.stream("POST", f"{self._url}/completions", json=body) as answer:
            if answer.is_error:
                await answer.aread()
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if begun and line.startswith("data:"):
                    begun.set()
