"""What every end-to-end test works with: checkpoints, servers, and answers kept for comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.checkpoints import Checkpoints
from tests.e2e.client import Client
from tests.e2e.servers import Server, ServerPool, Spec, speculation
from tests.e2e.workload import ids_of, run_batches

COMMON = (
    # "auto" turns fp32 checkpoints into bf16, where the order of a sum may change a token.
    "--dtype",
    "float32",
    "--max-total-tokens",
    8192,
    "--max-running-requests",
    16,
    "--skip-server-warmup",
    "--enable-custom-logit-processor",
    "--random-seed",
    7,
)
# Verify all drafts in every round, so that what is drafted and accepted does not depend on time.
STEADY = {"SGLANG_EXT_SCHEDULER": "off", "SGLANG_EXT_DRAFT_PAYS": "0"}


class Stand:
    """Servers of tiny models by what is asked of them."""

    def __init__(self) -> None:
        self.checkpoints = Checkpoints()
        self.pool = ServerPool()
        self._plain: dict[tuple[str, int], list[list[list[int]]]] = {}

    def plain_spec(
        self, target: Path, *flags: object, env: Mapping[str, str] | None = None
    ) -> Spec:
        return Spec.of("--model-path", target, *COMMON, *flags, env=env)

    def spec(
        self,
        algorithm: str,
        draft: Path,
        target: Path,
        gamma: int | None,
        *flags: object,
        env: Mapping[str, str] | None = None,
    ) -> Spec:
        more = (*speculation(algorithm, draft, gamma), *flags)
        return self.plain_spec(target, *more, env=STEADY | dict(env or {}))

    def server(self, spec: Spec) -> Server:
        return self.pool.get(spec)

    def plain(self, kind: str = "llama") -> Client:
        """A server of the target alone.

        Without overlap: with it, SGLang's repetition penalty now and then misses a token.
        """
        target = self.checkpoints.target(kind)
        return self.server(self.plain_spec(target, "--disable-overlap-schedule")).client

    def speculative(
        self,
        algorithm: str,
        name: str | None = None,
        *flags: object,
        kind: str = "llama",
        gamma: int | None = 4,
        env: Mapping[str, str] | None = None,
    ) -> Client:
        """A server with speculation."""
        name = name or {"DSPARK": "vanilla", "DFLASH": "zlab"}[algorithm]
        draft = self.checkpoints.draft(algorithm, name, kind)
        target = self.checkpoints.target(kind)
        return self.server(self.spec(algorithm, draft, target, gamma, *flags, env=env)).client

    def plain_answers(self, kind: str, tokens: int = 33) -> list[list[list[int]]]:
        """Ids of the standard workload without speculation, asked once."""
        key = (kind, tokens)
        if key not in self._plain:
            self._plain[key] = ids_of(run_batches(self.plain(kind), tokens))
        return self._plain[key]

    def close(self) -> None:
        self.pool.close()


_stand: Stand | None = None


@pytest.fixture(scope="session")
def stand() -> Iterator[Stand]:
    """One stand per run, shared by every folder that imports this fixture."""
    global _stand
    if _stand is None:
        _stand = Stand()
    yield _stand
    _stand.close()
