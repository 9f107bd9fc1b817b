"""Which full blocks of a request hold what other requests need too: prefix caching."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable
from hashlib import blake2b

from jaxserve.errors import AuditFailed
from jaxserve.sched.blocks import BlockPool
from jaxserve.sched.request import Request

_DIGEST_BYTES = 16


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


class PrefixCache:
    """Finds the blocks that hold the start of a request, and registers those it fills.

    A request's chain of digests starts at a root and has one entry a full block, prompt and output
    alike: the hash of the entry before it and of the block's tokens. So equal digests mean equal
    tokens from the first on, under the same root, which says whose blocks may be shared: those
    computed by the same weights, for requests of the same cache salt. The root also holds a secret
    of this process; without it nobody can search for two prompts that collide.

    With caching off, only requests of one group share, and only while one of them holds a block;
    others have no chain and cost nothing.

    ``prompts_only`` keeps what decode steps wrote to itself: a prompt is then always computed by
    prefill steps, whose sums may run in another order.

    Nothing is ever written to a shared block. Where a request is found to its end, its last block
    is computed again into a block of its own (the copy on write): its last token has to be fed for
    the logits anyway.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool, prompts_only: bool = False) -> None:
        self.weight_version = 0
        self.num_queries = 0
        self.num_hits = 0
        self._pool = pool
        self._enabled = enabled
        self._prompts_only = prompts_only
        self._secret = secrets.token_bytes(_DIGEST_BYTES)

    def match(self, request: Request) -> list[int]:
        """Blocks that hold the first tokens of a request which holds none, its last token left out.

        A request that owes its prompt's log probabilities has to compute them, so it takes none.
        """
        if not request.chain and (self._enabled or request.group is not None):
            request.chain.append(self._root(request))
        if not request.chain or request.scores_prompt:
            return []
        blocks: list[int] = []
        for i in range(1, (request.num_tokens - 1) // self._pool.block_size + 1):
            self._extend(request, i)
            block = self._pool.find(request.chain[i])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take(self, request: Request, blocks: list[int]) -> None:
        """Give ``request`` the ``blocks`` it matched: their tokens count as computed.

        Tokens looked up and found are counted when a request is first scheduled, so that one that
        finds its own blocks after a preemption does not look like a hit.
        """
        self._pool.share(blocks)
        request.block_ids = blocks
        request.num_registered = len(blocks)
        request.num_computed = len(blocks) * self._pool.block_size
        if request.first_scheduled_at is None:
            request.num_cached_tokens = request.num_computed
            if request.chain and not request.scores_prompt:
                self.num_queries += request.num_tokens
                self.num_hits += request.num_computed

    def register(self, request: Request, num_computed: int) -> None:
        """Let the blocks be found that the first ``num_computed`` tokens of ``request`` fill.

        The step that computes them must be the one being scheduled or an earlier one. Tokens that
        are not read back yet cannot be hashed, so their block comes later.
        """
        if not request.chain:
            return
        known = len(request.prompt_token_ids) if self._prompts_only else request.num_tokens
        full = min(num_computed, known) // self._pool.block_size
        if full <= request.num_registered:
            return
        self._extend(request, full)
        for i in range(request.num_registered, full):
            self._pool.register(request.block_ids[i], request.chain[i + 1])
        request.num_registered = full

    def release(self, request: Request) -> None:
        """Register what ``request`` has filled and drop its references."""
        if request.block_ids:
            self.register(request, request.num_computed)
            self._pool.free(request.block_ids)
        request.block_ids = []

    def reset(self, unfinished: Iterable[Request], weight_version: int | None = None) -> None:
        """Forget every block. What ``unfinished`` requests hold is never shared from now on.

        ``weight_version``: that of the weights which compute all that follows, when they changed.
        """
        self._pool.forget()
        for request in unfinished:
            # Rooted anew at its next admission: until then it builds on blocks of the past.
            request.chain.clear()
        if weight_version is not None:
            self.weight_version = weight_version

    def _root(self, request: Request) -> bytes:
        group = None if self._enabled else request.group
        said = repr((self.weight_version, request.cache_salt, group))
        return _digest(self._secret + said.encode())

    def _extend(self, request: Request, num_blocks: int) -> None:
        """Lengthen the chain of ``request`` to ``num_blocks``, whose tokens are known."""
        chain, size = request.chain, self._pool.block_size
        done = len(chain) - 1
        if done >= num_blocks:
            return
        tokens = array("i", request.tokens_between(done * size, num_blocks * size))
        content, step = tokens.tobytes(), size * tokens.itemsize
        for start in range(0, len(content), step):
            chain.append(_digest(chain[-1] + content[start : start + step]))

    def audit(self, request: Request) -> None:
        """Raise AuditFailed unless every block of ``request`` is under its own tokens' digest."""
        size = self._pool.block_size
        right = [self._root(request)] if request.chain else []
        for i in range(len(request.chain) - 1):
            tokens = request.tokens_between(i * size, (i + 1) * size)
            right.append(_digest(right[i] + array("i", tokens).tobytes()))
        if request.chain != right:
            raise AuditFailed(f"request {request.request_id}: its chain is not that of its tokens")
        for i, block in enumerate(request.block_ids):
            digest = self._pool.digest_of(block)
            if digest is not None and digest not in right[i + 1 : i + 2]:
                raise AuditFailed(
                    f"request {request.request_id}: its block {i}, {block} of the pool, is "
                    "registered under tokens that are not its own"
                )
