"""The small GPT and its plain step: counted by hand, causal, and able to learn."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpucourse import gpt, training  # noqa: E402
from gpucourse.training import GPT, GPTConfig, next_token_loss, night_config, plain_step, random_tokens  # noqa: E402

TINY = GPTConfig(layers=2, width=32, heads=4, vocabulary=61, context=16)


def model_of(config: GPTConfig = TINY, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


def test_the_nights_model_has_124_million_parameters_counted_by_hand() -> None:
    block = 768 * 2304 + 2304 + 768 * 768 + 768 + 768 * 3072 + 3072 + 3072 * 768 + 768 + 4 * 768
    by_hand = 50_304 * 768 + 1_024 * 768 + 12 * block + 2 * 768
    assert night_config().parameters == by_hand == 124_475_904


@pytest.mark.parametrize("config", [TINY, GPTConfig(layers=1, width=6, heads=3, vocabulary=5, context=7)])
def test_the_model_has_as_many_parameters_as_its_shape_says(config: GPTConfig) -> None:
    assert sum(p.numel() for p in model_of(config).parameters()) == config.parameters


def test_the_nights_model_is_what_its_shape_says_without_its_memory() -> None:
    with torch.device("meta"):
        night = GPT(night_config())
    assert sum(p.numel() for p in night.parameters()) == 124_475_904
    assert len(night.blocks) == 12
    assert night_config().head_width == 64


def test_words_in_and_words_out_share_one_table() -> None:
    model = model_of()
    assert model.head.weight is model.token.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_before_training_every_word_is_about_as_likely() -> None:
    model, (tokens, targets) = model_of(), random_tokens(TINY, 8)
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(math.log(TINY.vocabulary), abs=0.1)


def test_a_later_token_does_not_change_an_earlier_score() -> None:
    model, (tokens, _) = model_of(), random_tokens(TINY, 3)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % TINY.vocabulary
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9], after[:, 9])
    assert not torch.allclose(before[:, 10], after[:, 10])  # it sees what stands before it


def test_the_order_of_the_tokens_matters() -> None:
    model, (tokens, _) = model_of(), random_tokens(TINY, 1)
    swapped = tokens[:, [1, 0, *range(2, 16)]]
    assert tokens[0, 0] != tokens[0, 1]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1])


def test_a_gradient_reaches_every_parameter() -> None:
    model, (tokens, targets) = model_of(), random_tokens(TINY, 8)
    torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []


def test_the_last_matrices_of_a_block_start_smaller() -> None:
    config = dataclasses.replace(TINY, width=128, layers=8)
    model = model_of(config)
    assert model.blocks[0].up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[0].down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.blocks[0].attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_it_learns_a_small_set_by_heart(precision: training.Precision) -> None:
    model, batch = model_of(), random_tokens(TINY, 4, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = [plain_step(model, optimizer, *batch, precision).item() for _ in range(60)]
    assert losses[0] == pytest.approx(math.log(TINY.vocabulary), abs=0.15)
    assert losses[-1] < 0.35 * losses[0]


def test_a_step_changes_the_parameters_frees_the_gradients_and_gives_the_loss_before_it() -> None:
    model, (tokens, targets) = model_of(), random_tokens(TINY, 2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    expected = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss = plain_step(model, torch.optim.SGD(model.parameters(), lr=0.1), tokens, targets)
    torch.testing.assert_close(loss, expected.detach())
    assert not loss.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert all(not torch.equal(before[n], p) for n, p in model.named_parameters())


def test_another_way_to_the_loss_takes_the_place_of_the_plain_one() -> None:
    model, batch = model_of(), random_tokens(TINY, 2)
    seen = []

    def doubled(model, tokens, targets):
        seen.append(tokens.shape)
        return 2 * next_token_loss(model, tokens, targets)

    plain = plain_step(model_of(), torch.optim.SGD(model.parameters()), *batch)
    loss = plain_step(model, torch.optim.SGD(model.parameters()), *batch, loss_of=doubled)
    torch.testing.assert_close(loss, 2 * plain)
    assert seen == [(2, 16)]


def test_the_fp16_steps_loss_scale_does_not_change_its_update() -> None:
    after = {}
    for precision in ("fp32", "fp16"):
        model, batch = model_of(), random_tokens(TINY, 4)
        plain_step(model, torch.optim.SGD(model.parameters(), lr=1.0), *batch, precision)
        after[precision] = torch.cat([p.detach().flatten() for p in model.parameters()])
    start = torch.cat([p.detach().flatten() for p in model_of().parameters()])
    moved = (after["fp32"] - start).norm()
    assert (after["fp16"] - after["fp32"]).norm() < 0.02 * moved


@pytest.mark.parametrize("allowed", [True, False])
def test_what_was_set_for_tf32_is_put_back_even_after_an_error(allowed: bool) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    seen = []

    class Failing(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            seen.append(matmul.allow_tf32)
            raise RuntimeError("as asked")

    model = model_of()
    try:
        matmul.allow_tf32 = allowed
        for precision in ("fp32", "tf32"):
            with pytest.raises(RuntimeError, match="as asked"):
                plain_step(Failing(), torch.optim.SGD(model.parameters()), *random_tokens(TINY, 1), precision)
            assert matmul.allow_tf32 is allowed
    finally:
        matmul.allow_tf32 = before
    assert seen == [False, True]


def test_a_target_of_minus_100_does_not_count() -> None:
    model, (tokens, targets) = model_of(), random_tokens(TINY, 2)
    masked = targets.clone()
    masked[1] = -100
    half = plain_step(model_of(), torch.optim.SGD(model.parameters()), tokens, masked)
    alone = plain_step(model_of(), torch.optim.SGD(model.parameters()), tokens[:1], targets[:1])
    torch.testing.assert_close(half, alone)


def test_random_tokens_are_followed_by_their_targets_and_follow_their_seed() -> None:
    tokens, targets = random_tokens(TINY, 5, seed=3)
    assert tokens.shape == targets.shape == (5, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, random_tokens(TINY, 5, seed=3)[0])
    assert not torch.equal(tokens, random_tokens(TINY, 5, seed=4)[0])
    assert tokens.max() < TINY.vocabulary


# --- what cannot be ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"layers": 0}, ValueError, "layers is 0; wanted 1 or more"),
        ({"width": -8}, ValueError, "width is -8"),
        ({"heads": 5}, ValueError, "width 32 does not divide into 5 heads; 2 would be left over"),
        ({"vocabulary": 1.5}, TypeError, "vocabulary must be a whole number, not 1.5"),
        ({"context": True}, TypeError, "context must be a whole number, not True"),
    ],
)
def test_an_impossible_shape_is_named(change, error, said) -> None:
    with pytest.raises(error, match=said):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize(
    ("tokens", "error", "said"),
    [
        (torch.zeros(2, 17, dtype=torch.int64), ValueError, "17 tokens and the model's context is 16"),
        (torch.zeros(16, dtype=torch.int64), ValueError, r"shape \(16,\); wanted \(examples, tokens\)"),
        (torch.zeros(0, 16, dtype=torch.int64), ValueError, r"shape \(0, 16\)"),
        (torch.zeros(2, 16), TypeError, "tokens are torch.float32; wanted whole numbers"),
    ],
)
def test_tokens_that_the_model_cannot_read_are_named(tokens, error, said) -> None:
    with pytest.raises(error, match=said):
        model_of()(tokens)


def test_a_token_beyond_the_vocabulary_is_an_error() -> None:
    with pytest.raises(IndexError):
        model_of()(torch.full((1, 4), TINY.vocabulary))


def test_a_step_asked_for_wrongly_says_what_it_takes() -> None:
    model, (tokens, targets) = model_of(), random_tokens(TINY, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="precision is 'fp8'; wanted one of fp32, tf32, bf16, fp16"):
        plain_step(model, optimizer, tokens, targets, "fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tokens have the shape \(2, 16\) and targets \(2, 15\)"):
        plain_step(model, optimizer, tokens, targets[:, 1:])
    with pytest.raises(TypeError, match="GPT takes a GPTConfig, such as night_config"):
        GPT(12)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="examples is 0"):
        random_tokens(TINY, 0)
    with pytest.raises(TypeError, match=r"examples must be a whole number, not 2\.0"):
        random_tokens(TINY, 2.0)  # type: ignore[arg-type]


def test_the_model_is_reached_from_both_of_its_modules() -> None:
    assert training.GPT is gpt.GPT
    with pytest.raises(AttributeError, match="has no attribute 'Transformer'"):
        _ = training.Transformer


def small() -> tuple:
    config = GPTConfig(layers=1, width=16, heads=2, vocabulary=11, context=8)
    model = GPT(config)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), *random_tokens(config, 2)


@pytest.mark.parametrize("name", ["tokens", "targets"])
@pytest.mark.parametrize("as_what", [lambda t: t.tolist(), lambda t: t.numpy(), lambda t: None])
def test_a_batch_that_is_no_tensor_is_refused_before_the_forward_pass(name, as_what):
    model, optimizer, tokens, targets = small()
    batch = {"tokens": tokens, "targets": targets}
    batch[name] = as_what(batch[name])
    with pytest.raises(TypeError, match=f"{name} are a .*; wanted a tensor"):
        plain_step(model, optimizer, **batch)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool])
def test_targets_of_another_type_are_refused_unless_the_loss_is_the_callers_own(dtype):
    model, optimizer, tokens, targets = small()
    with pytest.raises(TypeError, match=f"targets are {dtype}; wanted torch.int64"):
        plain_step(model, optimizer, tokens, targets.to(dtype))
    squares = plain_step(
        model,
        optimizer,
        tokens,
        targets.to(dtype),
        loss_of=lambda m, x, y: m(x).square().mean() + 0 * y.sum(),
    )
    assert torch.isfinite(squares)


def test_a_model_is_given_tensors():
    model, *_ = small()
    with pytest.raises(TypeError, match="tokens are a list; wanted a tensor of whole numbers"):
        model([[1, 2]])


def test_numpys_integers_are_whole_numbers_too():
    shape = dict.fromkeys(("layers", "heads"), np.int64(1)) | {
        "width": np.int32(16),
        "vocabulary": 11,
        "context": 8,
    }
    config = GPTConfig(**shape)
    assert config == GPTConfig(layers=1, heads=1, width=16, vocabulary=11, context=8)
    assert type(config.parameters) is int
    tokens, _ = random_tokens(config, np.int64(2), seed=np.int64(3))
    assert torch.equal(tokens, random_tokens(config, 2, seed=3)[0])


@pytest.mark.parametrize("seed", [True, None, 1.5, "a"])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(TypeError, match="seed must be a whole number"):
        random_tokens(small()[0].config, 1, seed=seed)


def test_a_seed_has_64_bits():
    config = small()[0].config
    random_tokens(config, 1, seed=2**64 - 1)
    random_tokens(config, 1, seed=-(2**63))
    for seed in (2**64, 10**5000, -(2**63) - 1):
        with pytest.raises(ValueError, match="wanted one of 64 bits"):
            random_tokens(config, 1, seed=seed)


def test_a_step_in_which_no_target_counts_is_not_a_number():
    model, optimizer, tokens, targets = small()
    assert torch.isnan(plain_step(model, optimizer, tokens, torch.full_like(targets, -100)))
