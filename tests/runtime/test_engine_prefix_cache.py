"""Conversations over the fake device, which reads back what each row's block table says.

A block shared with the wrong request, too early, too long or under the wrong weights changes what
a row reads, and so its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import SamplingParams
from jaxserve.errors import EngineDead
from jaxserve.runtime.engine import Engine
from jaxserve.sched import prefix
from jaxserve.sched.blocks import BlockPool
from jaxserve.sched.prefix import PrefixCache
from jaxserve.sched.request import Request
from tests.engine_harness import VOCAB, Outcome, build, collect, drain, expected, greedy
from tests.fakes import FakeRunner

LONGEST = 63


@dataclass
class Asked:
    """A request, and how to tell its answer: ``known`` tokens, then those that ``weights`` draw.

    ``weights`` is None once a part of its K/V was made by other weights than the rest.
    """

    prompt: list[int]
    weights: int | None
    known: list[int] = field(default_factory=list)

    def answer(self, params: SamplingParams, outcome: Outcome) -> tuple[list[int], str | None]:
        """What the request alone gives; so much of it as ``outcome`` has where it was ended."""
        if self.weights is None:
            return outcome.result
        assert params.max_tokens is not None
        left = replace(params, max_tokens=params.max_tokens - len(self.known))
        tokens, reason = expected(self.prompt + self.known, left, weights=self.weights)
        tokens = self.known + tokens
        if outcome.result[1] == "abort":
            return tokens[: len(outcome.tokens)], "abort"
        return tokens, reason


@dataclass
class Conversation:
    """Turns of one user; each begins with the turn before it and its answer."""

    name: str
    opening: list[int]
    turns: list[list[int]]
    params: SamplingParams
    salt: str = ""
    choices: int = 1
    begins: int = 0
    abort: int | None = None  # steps after which the turn that runs is ended
    asked: dict[str, Asked] = field(default_factory=dict)
    waits_for: str | None = None

    def prompt_after(self, outcomes: dict[str, Outcome]) -> list[int] | None:
        """The next turn's prompt; None where there is none, or none yet."""
        if not self.turns:
            return None
        if self.waits_for is None:
            return self.opening + self.turns[0]
        outcome = outcomes.get(self.waits_for)
        if outcome is None or outcome.last is None:
            return None
        prompt = self.asked[self.waits_for].prompt + outcome.tokens + self.turns[0]
        return prompt if len(prompt) <= LONGEST else None


class Chat:
    """Drives an engine with conversations, resets and new weights."""

    def __init__(
        self,
        conversations: list[Conversation],
        on_update: Literal["keep", "recompute"] = "keep",
        **changes: Any,
    ) -> None:
        self.engine, self.runner = build(**changes)
        self.caching = changes.get("enable_prefix_caching", True)
        self.conversations = conversations
        self.on_update: Literal["keep", "recompute"] = on_update
        self.outcomes: dict[str, Outcome] = {}

    def run(self, resets: set[int], new_weights: set[int], steps: int = 120) -> None:
        for now in range(steps):
            if now in resets:
                self.engine.reset_prefix_cache()
            if now in new_weights:
                self.change_weights()
            for conversation in self.conversations:
                self.speak(conversation, now)
            collect(self.outcomes, self.engine.step())
            self.engine.audit()
            self.check_isolation()
        drain(self.engine, self.outcomes)

    def answers(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tokens and finish reason of every request: what it was told, and what it alone gives."""
        told, alone = {}, {}
        for conversation in self.conversations:
            for name, asked in conversation.asked.items():
                outcome = self.outcomes[name]
                told[name], alone[name] = outcome.result, asked.answer(conversation.params, outcome)
        return told, alone

    def check_cached_tokens(self) -> None:
        """Whole blocks are found, never all of a prompt: its last token is computed."""
        for conversation in self.conversations:
            for name, asked in conversation.asked.items():
                last = self.outcomes[name].last
                assert last is not None
                assert last.num_cached_tokens in range(0, len(asked.prompt), 8)

    def change_weights(self) -> None:
        self.engine.update_params(None, requests=self.on_update)
        self.engine.audit()
        for conversation in self.conversations:
            for name, asked in conversation.asked.items():
                request = self.engine._scheduler.find(name)
                if request is None:
                    continue
                if self.on_update == "recompute":
                    asked.weights = self.runner.weights
                    asked.known = list(request.output_token_ids)
                elif request.first_scheduled_at is not None:
                    asked.weights = None
                else:
                    asked.weights = self.runner.weights

    def speak(self, conversation: Conversation, now: int) -> None:
        if now < conversation.begins:
            return
        if conversation.abort == now and conversation.waits_for is not None:
            self.engine.abort_request(conversation.waits_for)
        prompt = conversation.prompt_after(self.outcomes)
        if prompt is None:
            return
        turn = f"{conversation.name}/{len(conversation.asked)}"
        del conversation.turns[0]
        for choice in range(conversation.choices):
            name = f"{turn}/{choice}"
            self.engine.add_request(
                name,
                prompt,
                conversation.params,
                cache_salt=conversation.salt,
                group=turn if conversation.choices > 1 else None,
            )
            conversation.asked[name] = Asked(prompt, self.runner.weights)
            conversation.waits_for = name

    def check_isolation(self) -> None:
        for one, other in combinations(self.engine._scheduler.running.values(), 2):
            if one.cache_salt != other.cache_salt or not (
                self.caching or (one.group is not None and one.group == other.group)
            ):
                assert not set(one.block_ids) & set(other.block_ids)


@st.composite
def conversations(draw: Any) -> list[Conversation]:
    openings = [draw(st.lists(st.integers(0, 1), min_size=1, max_size=30)) for _ in range(2)]
    turns = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), max_size=4)
    return [
        Conversation(
            name=f"c{i}",
            opening=draw(st.sampled_from(openings)),
            turns=[draw(st.lists(st.integers(0, 1), max_size=10)), *draw(turns)],
            params=SamplingParams(
                max_tokens=draw(st.sampled_from([1, 2, 7, 8, 9, 20])),
                temperature=draw(st.sampled_from([0.0, 0.7])),
                seed=draw(st.integers(0, 2)),
                ignore_eos=draw(st.booleans()),
            ),
            salt=draw(st.sampled_from(["", "", "s"])),
            choices=draw(st.sampled_from([1, 1, 3])),
            begins=draw(st.integers(0, 20)),
            abort=draw(st.none() | st.integers(0, 40)),
        )
        for i in range(draw(st.integers(1, 7)))
    ]


MOMENTS = st.sets(st.integers(0, 60), max_size=2)


@given(
    conversations(),
    MOMENTS,
    MOMENTS,
    st.fixed_dictionaries(
        {
            "num_blocks": st.integers(9, 40),
            "max_num_seqs": st.integers(1, 5),
            "max_num_batched_tokens": st.sampled_from([5, 8, 17, 64]),
            "watermark": st.sampled_from([0.0, 0.1, 0.9]),
            "enable_prefix_caching": st.booleans(),
            "on_update": st.sampled_from(["keep", "recompute"]),
        }
    ),
)
def test_a_soak_of_conversations_reads_no_history_but_its_own(talks, resets, new_weights, changes):
    chat = Chat(talks, **changes)
    chat.run(resets, new_weights)
    told, alone = chat.answers()
    assert told == alone
    chat.check_cached_tokens()


STEM = [1, 0, 1, 1, 0, 0, 1, 0]  # one block


def busy(**changes: Any) -> Chat:
    """Chat with shared starts, several turns, choices, eviction and a change of weights."""
    said = [[2, 3], [4], [5, 6, 7]]
    talks = [
        Conversation("alike", STEM * 2 + [9], [[], *said], greedy(7)),
        Conversation("salted", STEM * 2 + [9], [[]], greedy(7), salt="s"),
        Conversation("again", STEM * 2 + [9], [[8], *said], greedy(7), begins=9),
        # Blocks of the same tokens at other positions, and behind others.
        Conversation("shifted", STEM * 3, [[]], greedy(9)),
        Conversation("behind", [3] * 8 + STEM, [[9], *said], greedy(9), begins=2),
        Conversation("choices", [*STEM, 4, 4], [[], [2]], greedy(9), choices=3),
        Conversation("late", STEM * 2 + [9], [[], *said], greedy(12), begins=45),
        Conversation("later", [*STEM, 4, 4], [[], *said], greedy(12), begins=60),
    ]
    values: dict[str, Any] = {"num_blocks": 1 + 13}
    return Chat(talks, **values | changes)


def run_busy(chat: Chat) -> None:
    chat.run(set(), {44})
    told, alone = chat.answers()
    assert told == alone


@pytest.mark.parametrize("on_update", ["keep", "recompute"])
@pytest.mark.parametrize("caching", [True, False])
def test_a_busy_chat_shares_evicts_and_preempts_and_every_answer_is_right(
    caching, on_update, monkeypatch
):
    evictions = []
    evict = BlockPool._evict
    monkeypatch.setattr(BlockPool, "_evict", lambda p: evictions.append(1) or evict(p))
    chat = busy(enable_prefix_caching=caching, on_update=on_update)
    run_busy(chat)
    chat.check_cached_tokens()
    stats = chat.engine.stats()
    assert stats.prefix_cache_hits > 0  # without caching, the choices of one answer share
    assert stats.num_preemptions > 0
    assert bool(evictions) == caching
    assert stats.weight_version == chat.engine.weight_version == 1


def digests_forget_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = prefix._digest
    monkeypatch.setattr(prefix, "_digest", lambda content: digest(content[-32:]))


def an_evicted_block_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def evict(pool: BlockPool) -> int:
        block, _ = pool._unused.popitem(last=False)
        del pool._digest_of[block]
        return block

    monkeypatch.setattr(BlockPool, "_evict", evict)


def a_shared_block_is_given_away_by_the_first_who_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(pool: BlockPool, blocks: list[int]) -> None:
        for block in blocks:
            pool._unused.pop(block, None)
            pool._num_refs[block] = 1

    def free(pool: BlockPool, blocks: list[int]) -> None:
        for block in blocks:
            if pool._num_refs[block]:
                pool._num_refs[block] = 0
                pool._empty.append(block)

    monkeypatch.setattr(BlockPool, "share", share)
    monkeypatch.setattr(BlockPool, "free", free)


def salts_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "_root", lambda cache, request: b"root")


def old_weights_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "reset", lambda cache, unfinished, weight_version: None)


def matched_blocks_are_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    match = PrefixCache.match

    def swapped(cache: PrefixCache, request: Request) -> list[int]:
        return match(cache, request)[::-1]

    monkeypatch.setattr(PrefixCache, "match", swapped)


@pytest.mark.parametrize(
    "damage",
    [
        digests_forget_what_came_before,
        an_evicted_block_is_still_found,
        a_shared_block_is_given_away_by_the_first_who_leaves,
        salts_are_ignored,
        old_weights_are_not_forgotten,
        matched_blocks_are_out_of_order,
    ],
)
def test_a_cache_that_errs_is_caught_by_the_device_or_the_tokens_without_an_audit(
    damage, monkeypatch
):
    damage(monkeypatch)
    monkeypatch.setattr(Engine, "audit", lambda engine: None)
    with pytest.raises((AssertionError, EngineDead)):
        run_busy(busy())


@pytest.mark.parametrize("caching", [True, False])
def test_a_second_asking_computes_what_is_not_cached_and_says_how_much_was(caching):
    engine, _ = build(enable_prefix_caching=caching)
    computed, cached = [], []
    for name in ("first", "second"):
        before = engine.stats().scheduled_tokens
        engine.add_request(name, STEM * 3 + [2], greedy(1))
        outcome = drain(engine)[name]
        assert outcome.result == expected(STEM * 3 + [2], greedy(1))
        assert outcome.last is not None
        computed.append(engine.stats().scheduled_tokens - before)
        cached.append(outcome.last.num_cached_tokens)
    assert (computed, cached) == (([25, 1], [0, 24]) if caching else ([25, 25], [0, 0]))
    stats = engine.stats()
    assert stats.prefix_cache_queries == (50 if caching else 0)
    assert stats.prefix_cache_hits == (24 if caching else 0)
    assert stats.prompt_tokens == 50


def test_every_update_says_what_was_cached():
    engine, _ = build()
    engine.add_request("a", STEM * 2, greedy(3))
    drain(engine)
    engine.add_request("b", STEM * 2, greedy(3))
    updates = [update for _ in range(4) for update in engine.step()]
    assert [update.num_cached_tokens for update in updates] == [8, 8, 8]
    assert updates[-1].finish_reason == "length"


def test_a_request_ended_in_the_queue_had_nothing_cached():
    engine, _ = build(max_num_seqs=1)
    engine.add_request("a", STEM * 2, greedy(9))
    engine.step()
    engine.add_request("b", STEM * 2, greedy(9))
    engine.abort_request("b")
    last = drain(engine)["b"].last
    assert last is not None
    assert (last.finish_reason, last.num_cached_tokens) == ("abort", 0)
    assert engine.stats().prefix_cache_queries == 16


def test_a_reset_makes_the_next_asking_compute_everything():
    engine, _ = build()
    for reset, computed in ((False, 17), (False, 1), (True, 17)):
        if reset:
            engine.reset_prefix_cache()
        before = engine.stats().scheduled_tokens
        engine.add_request("a", [*STEM, *STEM, 1], greedy(1))
        drain(engine)
        assert engine.stats().scheduled_tokens - before == computed
    assert engine.weight_version == 0


def test_unused_cached_blocks_are_free_in_the_stats():
    engine, _ = build()
    engine.add_request("a", STEM * 3, greedy(1))
    drain(engine)
    assert engine.stats().kv_cache_usage == 0.0


class CountsPrefills(FakeRunner):
    """Writes down how many tokens each prefill computed."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.computed: list[int] = []

    def prefill(self, batch: Any) -> Any:
        self.computed.append(int(batch.cu_query_lens_S1[-1]))
        return super().prefill(batch)


@pytest.mark.parametrize("caching", [True, False])
def test_the_choices_of_one_answer_compute_their_prompt_once(caching):
    engine, runner = build(CountsPrefills, enable_prefix_caching=caching, max_num_seqs=5)
    prompt = [*STEM, *STEM, 3]
    params = [SamplingParams(max_tokens=9, seed=seed, ignore_eos=True) for seed in range(4)]
    for i, choice in enumerate(params):
        engine.add_request(str(i), prompt, choice, group="g")
    outcomes = drain(engine)
    assert runner.computed == [17 + 3 * 1]
    for i, choice in enumerate(params):
        assert outcomes[str(i)].result == expected(prompt, choice)
