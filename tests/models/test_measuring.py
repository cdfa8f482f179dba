"""Looking into a model: means over the right tokens, and nothing left behind."""

import pytest
import torch

from dslib.models import Decoder, DecoderConfig, probe
from dslib.models.measuring import named_matrices, recall_losses, recorded_calls
from dslib.optim import param_groups_for_muon
from dslib.tasks import RecallTask

MODEL = DecoderConfig(d_model=16, layers=1, heads=2)


def test_calls_are_recorded_in_their_order_inside_alone():
    first, second = torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)
    x = torch.randn(4, 2)
    with recorded_calls([second, first]) as calls:
        y = first(x)
        second(y)
    first(x)
    assert [call.module for call in calls] == [first, second]
    assert calls[0].input is x
    assert calls[0].output is calls[1].input is y


def test_hooks_are_removed_after_an_error_too():
    module = torch.nn.Linear(2, 3)
    with pytest.raises(RuntimeError), recorded_calls([module]):
        module(torch.randn(4, 5))
    assert not module._forward_hooks


def test_matrices_are_named_as_the_parameters_of_the_model_are():
    model = Decoder(MODEL)
    found = named_matrices(model)
    assert all(model.get_parameter(name) is weight for name, weight in found.items())
    assert {id(weight) for weight in found.values()} == {id(w) for w in param_groups_for_muon(model)[0]}


def test_probe_sees_what_is_there_and_leaves_no_hook_behind():
    model = Decoder(MODEL)
    with torch.no_grad():
        for weight in param_groups_for_muon(model)[0]:
            weight.fill_(0.5)
        sizes = probe(model, torch.ones(2, 8, dtype=torch.long))
        model.blocks[0].attention.query.weight.zero_()
        silent = probe(model, torch.ones(2, 8, dtype=torch.long))
    assert sizes["weight_rms"] == pytest.approx(0.5)
    assert sizes["largest_logit"] > 0
    assert silent["largest_logit"] == silent["logits_above"] == 0
    assert not any(
        block.attention._forward_hooks or block.attention._forward_pre_hooks for block in model.blocks
    )


def test_recall_losses_are_means_over_their_own_tokens_alone():
    model = Decoder(MODEL, seed=2)
    planted = RecallTask(facts=2, distance=8).evaluation(torch.arange(99, dtype=torch.uint8), 5, 20)
    found = recall_losses(model, planted, batch_size=2)
    logp = model(planted[0]).log_softmax(-1)
    text, recall = [], []
    for row, (targets, kinds) in enumerate(zip(*planted[1:], strict=True)):
        for place, (target, kind) in enumerate(zip(targets, kinds, strict=True)):
            where = recall if kind == 2 else text if kind == 0 else []
            where.append((-logp[row, place, target].item(), (logp[row, place].argmax() == target).item()))
    assert found["loss"] == pytest.approx(sum(loss for loss, _ in text) / len(text), rel=1e-5)
    assert found["recall_loss"] == pytest.approx(sum(loss for loss, _ in recall) / len(recall), rel=1e-5)
    assert found["recall_accuracy"] == pytest.approx(sum(hit for _, hit in recall) / len(recall))
