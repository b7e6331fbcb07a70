"""What holds for any engine and any requests. Tokens and blocks are few, so hits, copies and shortage are common."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings, strategies as st
from kvrouter.mocker.engine.types import UNSCOPED, PromptTooLong, Scope, pack_tokens

from .engine_harness import Drive, check_blocks, counted, engine, resident_copies

SCOPES = [UNSCOPED, Scope(cache_salt="s")]
engines = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(2, 14),
        "block_size": st.integers(1, 4),
        "max_sequences": st.integers(1, 4),
        "max_batched_tokens": st.integers(4, 20),
        "vocabulary_size": st.just(2),
        "prefix_caching": st.sampled_from([True, True, True, False]),
    }
).filter(lambda c: c["num_blocks"] * c["block_size"] > 1)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=24)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), prompts, st.integers(1, 12), st.sampled_from(SCOPES)),
        st.tuples(st.just("begin")),
        st.tuples(st.just("end")),
        st.tuples(st.just("step")),
        st.tuples(st.just("step")),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("clear")),
    ),
    max_size=60,
)


@settings(max_examples=400)
@given(engines, actions)
def test_blocks_events_and_endings_add_up(config: dict[str, int], script: list[tuple]) -> None:  # type: ignore[type-arg]
    drive = Drive(engine(**config))
    lengths: dict[str, tuple[int, int]] = {}
    endings: Counter[str] = Counter()
    in_step = False
    for action, *details in script:
        if action == "submit":
            prompt, max_tokens, scope = details
            name = str(len(lengths))
            try:
                drive.submit(name, prompt, max_tokens, scope=scope)
            except PromptTooLong:
                assert len(prompt) >= drive.engine.config.capacity_tokens
                continue
            lengths[name] = (len(prompt), max_tokens)
        elif action == "abort":
            final = drive.engine.abort(str(details[0]))
            assert (final is not None) == (str(details[0]) in lengths and not endings[str(details[0])])
            if final is not None:
                endings[final.request_id] += 1
        elif action == "clear":
            drive.engine.clear_cache()
        else:
            for half in ("begin", "end") if action == "step" else (action,):
                if half == "begin" and not in_step:
                    step = drive.engine.begin_step(drive.now)
                    if step is not None:
                        in_step = True
                        drive.steps.append(step)
                        drive.events += step.events
                        assert step.prefill_tokens + step.decode_sequences <= drive.engine.config.max_batched_tokens
                elif half == "end" and in_step:
                    in_step = False
                    endings.update(o.request_id for o in drive.end() if o.finish_reason is not None)
        check_blocks(drive.engine)
        assert resident_copies(drive.engine) == counted(drive.events)
        load = drive.engine.load()
        assert load.running + load.waiting == len(lengths) - endings.total()
        assert load.running <= drive.engine.config.max_sequences

    if in_step:
        endings.update(o.request_id for o in drive.end() if o.finish_reason is not None)
    rest = len(drive.outputs)
    drive.drain()
    endings.update(o.request_id for o in drive.outputs[rest:] if o.finish_reason is not None)
    assert endings == Counter(lengths.keys()), "every request ends, once"
    assert (drive.engine.load().active_blocks, drive.engine.load().waiting) == (0, 0)
    assert resident_copies(drive.engine) == counted(drive.events)
    tokens = Counter(o.request_id for o in drive.outputs)
    firsts = Counter(o.request_id for o in drive.outputs if o.first_token)
    assert all(count == 1 for count in firsts.values())
    assert firsts.keys() == tokens.keys()
    for name, reason in drive.finish_reasons().items():
        prompt_tokens, max_tokens = lengths[name]
        assert reason == "length"
        assert tokens[name] == min(max_tokens, drive.engine.config.capacity_tokens - prompt_tokens)


class NaiveCache:
    """One request at a time, block by block, with prefixes spelt out: what an engine's cache must do."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.empty = num_blocks
        self.idle: list[tuple[int, tuple[int, ...]]] = []  # (when stored, the whole prefix), next to be evicted first
        self.stored = 0

    def serve(self, prompt: list[int], output: list[int]) -> int:
        """Returns the cached tokens."""
        computed = [*prompt, *output][:-1]
        held: list[tuple[int, tuple[int, ...]]] = []
        for end in range(self.block_size, len(prompt), self.block_size):
            copies = [block for block in self.idle if block[1] == tuple(prompt[:end])]
            if not copies:
                break
            self.idle.remove(min(copies))
            held.append(min(copies))
        cached = len(held) * self.block_size
        for start in range(cached, len(computed), self.block_size):
            if self.empty:
                self.empty -= 1
            else:
                self.idle.pop(0)
            if start + self.block_size <= len(computed):
                held.append((self.stored, tuple(computed[: start + self.block_size])))
                self.stored += 1
        self.empty += len(computed) % self.block_size > 0
        self.idle += reversed(held)
        return cached


@settings(max_examples=300)
@given(
    st.integers(7, 14),
    st.integers(1, 4),
    st.integers(4, 40),
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 6)), max_size=25),
)
def test_requests_one_by_one_find_what_a_naive_cache_finds(
    num_blocks: int, block_size: int, budget: int, requests: list[tuple[list[int], int]]
) -> None:
    drive = Drive(engine(num_blocks=num_blocks, block_size=block_size, max_batched_tokens=budget, max_sequences=4))
    naive = NaiveCache(num_blocks, block_size)
    for i, (prompt, max_tokens) in enumerate(requests):
        if len(prompt) >= num_blocks * block_size:
            continue
        outputs = drive.run(str(i), prompt, max_tokens, seed=0)
        assert {o.cached_tokens for o in outputs} == {naive.serve(prompt, [t for o in outputs for t in o.token_ids])}
        assert Counter(pack_tokens(prefix[-block_size:]) for _, prefix in naive.idle) == sum(
            (Counter({b.tokens: b.copies}) for b in drive.engine.cached_blocks().values()), Counter()
        )
