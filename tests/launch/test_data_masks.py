"""B47: packed documents do not see each other, in each attention of a Hugging Face model."""

import pytest
import torch

from launch.data import Batch, block_diagonal_mask, model_inputs

LENGTHS = (3, 5)
TOLERANCE = 1e-5  # fp32


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def llama(request):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=request.param,
        initializer_range=0.2,  # large enough that a leak would show
    )
    return LlamaForCausalLM(config).eval()


def packed(documents, padding=0):
    """One row as `launch.data.samples` lays it out."""
    row = torch.cat([*documents, torch.zeros(padding, dtype=torch.long)])
    sizes = [len(d) for d in documents] + ([padding] if padding else [])
    numbers = list(range(len(documents))) + ([-1] if padding else [])
    position = torch.cat([torch.arange(n) for n in sizes])
    document = torch.cat([torch.full((n,), i) for n, i in zip(sizes, numbers)])
    return Batch(row[None], row[None], position[None], document[None])


def logits(model, batch, device):
    model = model.to(device)
    inputs = model_inputs(batch.to(device), attention=model.config._attn_implementation, dtype=model.dtype)
    with torch.no_grad():
        return model(**inputs).logits[0]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padding", [0, 2])
def test_packed_logits_equal_unpacked_ones(llama, padding, training, device):
    llama.train(training)
    documents = [torch.randint(64, (n,)) for n in LENGTHS]
    batch = packed(documents, padding)
    assert batch.position_ids[0, :8].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    result = logits(llama, batch, device)
    assert result.isfinite().all()
    start = 0
    for document in documents:
        alone = logits(llama, Batch(document[None], document[None]), device)
        torch.testing.assert_close(result[start : start + len(document)], alone, atol=TOLERANCE, rtol=0)
        start += len(document)


def test_changing_one_document_changes_nothing_in_the_other(llama, device):
    llama.eval()
    first, second = (torch.randint(1, 64, (n,)) for n in LENGTHS)
    before = logits(llama, packed([first, second]), device)
    after = logits(llama, packed([torch.flip(first, (0,)) * 0, second]), device)
    assert torch.equal(before[3:], after[3:]) and not torch.equal(before[:3], after[:3])
    plain = Batch(torch.cat([first, second])[None], torch.cat([first, second])[None])
    leaked = logits(llama, plain, device)[3:] - before[3:]
    assert leaked.abs().max() > 1000 * TOLERANCE, "without the mask this test would see the leak"


def test_mask_values_and_shapes():
    documents = torch.tensor([[0, 0, 1, -1], [0, 0, 0, 0]])
    mask = block_diagonal_mask(documents)
    assert mask.shape == (2, 1, 4, 4) and mask.dtype == torch.bool
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert torch.equal(mask[1, 0], torch.ones(4, 4, dtype=torch.bool).tril())
    for dtype in (torch.float32, torch.bfloat16):
        additive = block_diagonal_mask(documents, dtype)
        assert additive.dtype == dtype and additive.isfinite().all()
        assert torch.equal(additive == 0, mask) and (additive[~mask] == torch.finfo(dtype).min).all()


def test_model_inputs_by_attention_and_their_refusals():
    batch = packed([torch.arange(3), torch.arange(5)])
    assert set(model_inputs(batch, attention="flash_attention_2")) == {"input_ids", "position_ids"}
    assert set(model_inputs(Batch(batch.input_ids, batch.labels), attention="anything")) == {"input_ids"}
    with pytest.raises(ValueError, match="'linear'; allowed: sdpa, eager"):
        model_inputs(batch, attention="linear")
    with pytest.raises(ValueError, match=r"\[batch, sequence\], got shape \(3,\)"):
        block_diagonal_mask(torch.zeros(3))
