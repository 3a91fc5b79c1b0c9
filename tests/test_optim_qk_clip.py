"""QKClip: the logits of a clipped head come down to the threshold, those of the others stay."""

import pytest
import torch
from torch import Tensor, nn

from mfsdp.optim import Muon, QKClip


def logits(query: Tensor, key: Tensor, x: Tensor, heads: int) -> Tensor:
    """Attention logits of each query head, (heads, T, T); key heads are repeated where there are fewer."""
    dim = query.size(0) // heads
    q = (x @ query.T).unflatten(-1, (heads, dim)).transpose(0, 1)
    k = (x @ key.T).unflatten(-1, (-1, dim)).transpose(0, 1)
    return q @ k.repeat_interleave(heads // k.size(0), dim=0).mT


@pytest.mark.parametrize("key_heads", [4, 2])
def test_largest_logits_come_down_to_the_threshold(key_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = nn.Parameter(torch.randn(12, 8, generator=generator))
    key = nn.Parameter(torch.randn(3 * key_heads, 8, generator=generator))
    x = torch.randn(5, 8, generator=generator)
    before = logits(query.detach(), key.detach(), x, heads=4)
    largest = before.amax(dim=(1, 2))
    threshold = largest.median().item()
    clip = QKClip(threshold)
    clip.add(query, key, lambda: largest)
    optimizer = Muon([query, key], lr=0.0)
    optimizer.register_step_post_hook(clip)
    query.grad, key.grad = torch.ones_like(query), torch.ones_like(key)
    optimizer.step()
    after = logits(query.detach(), key.detach(), x, heads=4)
    torch.testing.assert_close(after.amax(dim=(1, 2)), largest.clamp(max=threshold))
    unclipped = largest <= threshold
    assert unclipped.any()
    torch.testing.assert_close(after[unclipped], before[unclipped])


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="threshold must be positive, but is 0"):
        QKClip(0)
    with pytest.raises(ValueError, match=r"the query must be a matrix, but its shape is \(6,\)"):
        QKClip().add(torch.ones(6), torch.ones(6, 2), lambda: torch.ones(3))
    with pytest.raises(ValueError, match="the key has 8 rows, more than the query, 6"):
        QKClip().add(torch.ones(6, 2), torch.ones(8, 2), lambda: torch.ones(3))
    with pytest.raises(ValueError, match="a query of 6 rows and a key of 4 do not share heads evenly"):
        QKClip().add(torch.ones(6, 2), torch.ones(4, 2), lambda: torch.ones(3))


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.full((4,), 2.0), "a query of 6 rows does not have 4 heads"),
        (torch.ones(0), "a query of 6 rows does not have 0 heads"),
        (torch.full((2,), 2.0), "a key of 2 rows does not have heads of 3 rows, as the query has"),
        (torch.full((1, 6), 2.0), r"a plain tensor of shape \(heads,\), but gives a Tensor of shape \(1, 6\)"),
    ],
)
def test_weights_that_lack_heads_are_refused_before_any_is_scaled(logits: torch.Tensor, message: str) -> None:
    clip, good = QKClip(1.0), nn.Parameter(torch.ones(6, 2))
    query, key = nn.Parameter(torch.ones(6, 2)), nn.Parameter(torch.ones(2, 2))
    clip.add(good, good, lambda: torch.full((2,), 2.0))
    clip.add(query, key, lambda: logits)
    with pytest.raises(ValueError, match=message):
        clip(Muon([good, query, key]), (), {})
    assert all(weight.eq(1).all() for weight in (good, query, key))


def test_weights_that_are_transposed_in_memory() -> None:
    query, key = torch.ones(2, 4).T, torch.ones(4, 2)
    clip = QKClip(1.0)
    clip.add(query, key, lambda: torch.tensor([1.0, 4.0]))
    clip(Muon([nn.Parameter(key)]), (), {})
    assert torch.equal(query, key)
    assert torch.equal(query, torch.tensor([[1.0], [1.0], [0.5], [0.5]]).expand(4, 2))


@pytest.mark.parametrize("logit", [float("nan"), float("inf")])
def test_a_head_whose_logits_are_not_finite_is_left_alone(logit: float) -> None:
    query, key = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(4, 2))
    clip = QKClip(1.0)
    clip.add(query, key, lambda: torch.tensor([logit, 4.0]))
    clip(Muon([query, key]), (), {})
    expected = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.5, 0.5], [0.5, 0.5]])  # sqrt(1 / 4)
    for weight in (query, key):
        torch.testing.assert_close(weight.detach(), expected)
