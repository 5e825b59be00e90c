"""Which layers of the target a checkpoint means: every row of the published conventions, and what cannot be."""

from __future__ import annotations

import pytest
from support_formats import FACTS, H, eagle3_file, library_config, random, read, renamed, source_of
from support_formats import eagle3_shapes as shapes_of

from hf_specgen.checkpoints.formats.base import Checkpoint, ReadOptions
from hf_specgen.checkpoints.formats.layer_ids import LayerIds, default_boundaries, resolve
from hf_specgen.errors import IncompatibleDrafter, SpecGenError
from hf_specgen.models.facts import TargetFacts

LAYERS = (8, 24, 32, 36, 61, 80)
IDS = "eagle_aux_hidden_state_layer_ids"


def options(layers: int, asked: str | None = None) -> ReadOptions:
    return ReadOptions(TargetFacts(H, FACTS.vocab_size, layers, "t/target"), asked)


def nested_in(ids: list[int] | None) -> dict:
    return {"eagle_config": {IDS: ids, "use_aux_hidden_state": True}}


def specforge(ids: list[int] | None, layers: int, asked: str | None = None) -> Checkpoint:
    config, tensors = eagle3_file(**nested_in(ids))
    return read(source_of(config, tensors), options(layers, asked))


def modelopt(ids: list[int], layers: int, asked: str | None = None, before_fc: bool = False) -> Checkpoint:
    config, tensors = eagle3_file("layers.0.", **nested_in(ids))
    del tensors["t2d"]
    if before_fc:
        tensors |= random({"input_norm.weight": (3 * H,)})
    return read(source_of(config, tensors), options(layers, asked))


def library(ids: list[int] | None, layers: int, asked: str | None = None) -> Checkpoint:
    _, tensors = eagle3_file("layers.0.")
    return read(source_of(library_config(**{IDS: ids}), tensors), options(layers, asked))


def top(ids: list[int], layers: int, inner: list[int] | None = None, asked: str | None = None) -> Checkpoint:
    """Read a flat file with ids at the top, where vLLM looks for them."""
    config, tensors = eagle3_file(**nested_in(inner), **{IDS: ids})
    return read(source_of(config, tensors), options(layers, asked))


def deepspec(ids: list[int], layers: int, told: int | None = None, asked: str | None = None) -> Checkpoint:
    vocab = FACTS.vocab_size
    tensors = random(shapes_of("layers.0.", len(ids), vocab) | {"embed_tokens.weight": (vocab, H)})
    tensors |= random({f"layers.0.self_attn.{name}.weight": (H // 4,) for name in ("q_norm", "k_norm")})
    config, _ = eagle3_file(model_type="qwen3", target_layer_ids=ids, ttt_length=7, num_target_layers=told or layers)
    config |= {"architectures": ["Qwen3Eagle3Model"], "draft_vocab_size": None}
    return read(source_of(config, tensors), options(layers, asked))


def bounds(found: Checkpoint) -> list[int]:
    return found.config.aux_layer_boundaries


@pytest.mark.parametrize("layers", LAYERS)
def test_without_ids_the_published_rule_is_used(layers: int) -> None:
    rule = [2, layers // 2, layers - 3]
    config, tensors = eagle3_file()
    assert bounds(read(source_of(config, tensors), options(layers))) == rule
    assert bounds(specforge(None, layers)) == rule
    assert bounds(library(None, layers)) == rule
    assert list(default_boundaries(layers)) == rule


@pytest.mark.parametrize("layers", LAYERS)
def test_default_ids_of_every_producer_mean_the_same_layers(layers: int) -> None:
    rule = [2, layers // 2, layers - 3]
    outputs = [1, layers // 2 - 1, layers - 4]
    for found in (specforge(outputs, layers), modelopt(outputs, layers), library(rule, layers)):
        assert bounds(found) == rule
        assert found.warnings == ()
    assert bounds(specforge(rule, layers)) == rule  # AQ-MedAI writes boundaries into eagle_config


@pytest.mark.parametrize("layers", LAYERS)
def test_the_five_layers_of_deepspec_are_outputs(layers: int) -> None:
    ids = [1, 2, layers // 2, layers - 3, layers - 1]
    assert bounds(deepspec(ids, layers)) == [index + 1 for index in ids]


def test_published_ids_that_follow_no_rule() -> None:
    assert bounds(specforge([1, 17, 33], 36)) == [2, 18, 34]
    assert bounds(specforge([1, 11, 21], 24)) == [2, 12, 22]
    assert bounds(specforge([2, 30, 58], 61)) == [2, 30, 58]
    assert bounds(specforge([2, 30, 58], 0)) == [2, 30, 58]  # the target is not known
    assert bounds(modelopt([24, 30, 36], 36)) == [24, 30, 36]  # a boundary of 36 layers, no layer
    assert bounds(modelopt([24, 30, 36], 0, before_fc=True)) == [24, 30, 36]


@pytest.mark.parametrize("layers", [*LAYERS, 48])
def test_ids_that_were_copied_from_layer_outputs(layers: int) -> None:
    """The speculators library's own example passes [1, 23, 44] for 48 layers: NVIDIA's ids, which are layer outputs."""
    outputs, rule = [1, layers // 2 - 1, layers - 4], [2, layers // 2, layers - 3]
    for known in (layers, 0):
        for found in (library(outputs, known), top(outputs, known), top(outputs, known, outputs)):
            assert bounds(found) == rule
            (warning,) = found.warnings
            assert "copied" in warning and "vLLM would feed other features" in warning and "calibrate" in warning
    assert bounds(library(outputs, layers, "boundary")) == outputs
    assert library(outputs, layers, "boundary").warnings == top(outputs, layers, asked="layer_output").warnings == ()


def test_ids_at_the_top_are_boundaries() -> None:
    """vLLM reads them there, and nobody else."""
    for found in (top([1, 17, 33], 36), top([4, 17, 30], 36), top([4, 17, 30], 0), library([1, 20, 30], 36)):
        assert "may be meant as boundaries or as layer outputs; they are read as boundary" in found.warnings[0]
        assert len(found.warnings) == 1
    assert bounds(top([1, 17, 33], 36)) == [1, 17, 33]
    assert bounds(library([1, 20, 30], 36)) == [1, 20, 30]
    rule = top([2, 18, 33], 36)
    assert (bounds(rule), rule.warnings) == ([2, 18, 33], ())
    last = top([24, 30, 36], 36)
    assert (bounds(last), last.warnings) == ([24, 30, 36], ())
    assert bounds(top([1, 17, 33], 36, [1, 17, 33])) == [2, 18, 34]  # the same list twice: the producer's meaning
    assert len(top([1, 17, 33], 36, [1, 17, 33]).warnings) == 1


def test_ids_under_their_other_name() -> None:
    name = "aux_hidden_state_layer_ids"
    for first in ("midlayer.", "layers.0."):
        config, tensors = eagle3_file(first, eagle_config={name: [1, 15, 28]})
        found = read(source_of(config, tensors), options(32))
        assert (bounds(found), found.warnings) == ([2, 16, 29], ())
        config, tensors = eagle3_file(first, eagle_config={name: [1, 11, 21], IDS: [1, 11, 21]})
        assert bounds(read(source_of(config, tensors), options(32))) == [2, 12, 22]
        config, tensors = eagle3_file(first, eagle_config={name: [1, 11, 21], IDS: [1, 12, 21]})
        with pytest.raises(IncompatibleDrafter, match="one list is required"):
            read(source_of(config, tensors), options(32))
    config, tensors = eagle3_file(eagle_config={}, **{name: [2, 16, 29]})
    assert bounds(read(source_of(config, tensors), options(32))) == [2, 16, 29]


def test_guesses_warn() -> None:
    """Where the target is not known, ids that begin with 2 say nothing unless they are a published rule's."""
    assert specforge([2, 30, 58], 0).warnings == ()
    assert len(specforge([2, 20, 58], 0).warnings) == 1
    assert specforge([1, 17, 33], 0).warnings == ()  # as SpecForge writes them and SGLang reads them


def test_doubtful_ids_are_read_as_the_producer_means_them_with_a_warning() -> None:
    found = specforge([4, 17, 30], 36)
    assert bounds(found) == [5, 18, 31]
    assert "aux_layer_convention" in found.warnings[0]
    assert library([1, 23, 44], 48, "layer_output").warnings == ()


def test_the_caller_decides() -> None:
    assert bounds(specforge([4, 17, 30], 36, "boundary")) == [4, 17, 30]
    assert bounds(specforge([1, 15, 28], 32, "boundary")) == [1, 15, 28]
    assert bounds(specforge([2, 16, 29], 32, "layer_output")) == [3, 17, 30]
    assert bounds(library([1, 23, 44], 48, "layer_output")) == [2, 24, 45]
    assert bounds(deepspec([1, 2, 3, 4, 5], 8, asked="boundary")) == [1, 2, 3, 4, 5]
    assert specforge([4, 17, 30], 36, "boundary").warnings == ()
    assert "no effect" in specforge(None, 36, "boundary").warnings[0]
    with pytest.raises(SpecGenError, match="one of boundary, layer_output"):
        specforge([1, 2, 3], 8, "output")


def test_the_note_tells_the_reading() -> None:
    notes = specforge([1, 15, 28], 32).notes
    assert any("boundaries [2, 16, 29]" in note and "layer outputs" in note for note in notes)


def test_an_unknown_target_leaves_the_rule_for_later() -> None:
    found = specforge(None, 0)
    assert bounds(found) == []
    assert any("once it is known" in note for note in found.notes)


@pytest.mark.parametrize("layers", [2, 4, 6])
def test_small_targets_have_no_three_default_layers(layers: int) -> None:
    with pytest.raises(IncompatibleDrafter, match="at least 7"):
        specforge(None, layers)
    assert resolve("t/drafter", LayerIds(None), 7, None).value == [2, 3, 4]


def test_impossible_ids_are_refused() -> None:
    with pytest.raises(IncompatibleDrafter, match="do not fit a target of 8 layers"):
        specforge([1, 5, 9], 8)
    with pytest.raises(IncompatibleDrafter, match="do not fit"):
        specforge([1, 4, 4], 8)
    with pytest.raises(IncompatibleDrafter, match="do not fit"):
        library([-1, 4, 5], 8)
    with pytest.raises(IncompatibleDrafter, match="made for a target of 36 layers and t/target has 8"):
        deepspec([1, 2, 3, 4, 5], 8, told=36)


def test_the_number_of_ids_must_fit_fc() -> None:
    with pytest.raises(IncompatibleDrafter, match="not 2 layers of hidden_size 16"):
        specforge([1, 5], 8, None)
    with pytest.raises(IncompatibleDrafter, match="which are not 4 layers"):
        specforge([1, 3, 5, 6], 8)


def test_ids_out_of_order_are_taken_in_the_order_of_layers() -> None:
    found = library([5, 2, 4], 8)
    assert bounds(found) == [2, 4, 5]
    assert "not in order" in found.warnings[0]


def test_ids_at_the_top_and_in_eagle_config() -> None:
    def both(top: list[int], inner: list[int]) -> Checkpoint:
        config, tensors = eagle3_file(**nested_in(inner), **{IDS: top})
        return read(source_of(config, tensors), options(36))

    assert bounds(both([5, 18, 31], [4, 17, 30])) == [5, 18, 31]  # both can be right in one way alone
    assert both([5, 18, 31], [4, 17, 30]).warnings == ()
    assert bounds(both([4, 17, 30], [4, 17, 30])) == [5, 18, 31]
    with pytest.raises(IncompatibleDrafter, match="equal ones are required"):
        both([4, 17, 30], [6, 17, 30])
    config, tensors = eagle3_file(**{IDS: [4, 17, 30]})
    assert bounds(read(source_of(config, tensors), options(36))) == [4, 17, 30]  # vLLM's key holds boundaries


def test_a_prefix_changes_nothing() -> None:
    config, tensors = eagle3_file("layers.0.", **nested_in([24, 30, 36]))
    tensors = renamed(tensors | random({"input_norm.weight": (3 * H,)}), "", "model.")
    assert bounds(read(source_of(config, tensors), options(0))) == [24, 30, 36]
