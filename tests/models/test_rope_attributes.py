"""Both spellings of rotary positions, which of them counts, and what is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from jaxpp.convert.attributes import Attributes
from jaxpp.models.decoder_config import DecoderConfig
from jaxpp.models.rope_attributes import LLAMA_ROPE, RopeNames, read_rope, write_rope
from jaxpp.nn.scaling import RopeScaling

HEAD_DIM, MAX_POSITIONS = 16, 128
NEOX = RopeNames(base="rotary_emb_base", partial="rotary_pct", default_partial=0.25)


def read(names: RopeNames = LLAMA_ROPE, **values: Any) -> dict[str, Any]:
    return read_rope(Attributes(values), HEAD_DIM, MAX_POSITIONS, names)


def scaling(**values: Any) -> RopeScaling:
    """Read one mapping in both spellings, which must say the same."""
    old, new = read(rope_scaling=values)["rope_scaling"], read(rope_parameters=values)["rope_scaling"]
    assert old == new
    return old


def test_nothing_said() -> None:
    assert read() == dict(rope_base=10_000.0, rope_scaling=RopeScaling(), rotary_dim=HEAD_DIM)
    assert read(RopeNames(default_base=1e6))["rope_base"] == 1e6


@pytest.mark.parametrize(
    "values",
    [
        dict(rope_theta=5e5),
        dict(rope_theta=500_000),
        dict(rope_theta=5e5, rope_scaling=None),
        dict(rope_parameters={"rope_theta": 5e5}),
        dict(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}),
        dict(rope_parameters={"rope_type": "default"}, rope_theta=5e5),
        dict(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, rope_theta=5e5, rope_scaling=None),
    ],
)
def test_places_of_the_base(values: dict[str, Any]) -> None:
    assert read(**values) == dict(rope_base=5e5, rope_scaling=RopeScaling(), rotary_dim=HEAD_DIM)


def test_places_of_the_rotated_share() -> None:
    assert read(NEOX)["rotary_dim"] == 4
    assert read(NEOX, rotary_pct=0.5)["rotary_dim"] == 8
    assert read(NEOX, partial_rotary_factor=0.5)["rotary_dim"] == 8
    assert read(NEOX, rope_parameters={"partial_rotary_factor": 0.5})["rotary_dim"] == 8
    assert read(NEOX, rotary_emb_base=500)["rope_base"] == read(NEOX, rope_theta=500)["rope_base"] == 500


@pytest.mark.parametrize(
    ("names", "values", "message"),
    [
        (LLAMA_ROPE, dict(rope_theta=1e4, rope_parameters={"rope_theta": 5e5}), "rope_theta 500000.0 and rope_theta"),
        (NEOX, dict(rotary_emb_base=1e4, rope_theta=5e5), "rotary_emb_base 10000.0 and rope_theta 500000.0"),
        (NEOX, dict(rotary_pct=0.5, rope_parameters={"partial_rotary_factor": 0.25}), "rotary_pct 0.5"),
        (LLAMA_ROPE, dict(rope_parameters={"rope_type": "default"}, rope_scaling={"factor": 2.0}), "which differ"),
        (LLAMA_ROPE, dict(rope_scaling={"rope_type": "yarn", "type": "linear", "factor": 2.0}), 'type "linear"'),
        (LLAMA_ROPE, dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor = 0.5"),
        (LLAMA_ROPE, dict(rope_theta="big"), "rope_theta = 'big'; a number is needed"),
        (LLAMA_ROPE, dict(rope_theta=0), "rope_theta = 0.0; a number above 0 is needed"),
        (LLAMA_ROPE, dict(rope_parameters={"rope_type": ["linear"]}), "unknown rope_type \"['linear']\""),
        (LLAMA_ROPE, dict(rope_parameters={"full_attention": 1}), "full_attention = 1; a mapping is needed"),
        (LLAMA_ROPE, dict(original_max_position_embeddings=0), "original_max_position_embeddings = 0; 2 or more"),
        (
            LLAMA_ROPE,
            dict(rope_scaling=dict(rope_type="llama3", factor=2.0, low_freq_factor=4.0, high_freq_factor=4.0)),
            "high_freq_factor 4.0 is not above low_freq_factor 4.0",
        ),
        (LLAMA_ROPE, dict(rope_scaling={"rope_type": "linear", "factor": "x"}), "factor = 'x'; a number is needed"),
        (LLAMA_ROPE, dict(rope_scaling=["linear"]), "a mapping is needed"),
        (LLAMA_ROPE, dict(rope_scaling={"rope_type": "foo", "factor": 2.0}), 'unknown rope_type "foo"'),
        (LLAMA_ROPE, dict(rope_scaling={"rope_type": "lama3", "factor": 2.0}), 'did you mean "llama3"? known:'),
        (LLAMA_ROPE, dict(rope_scaling={"factor": 2.0, "beta_fast": 32}), "beta_fast, factor but no rope_type"),
        (LLAMA_ROPE, dict(rope_scaling={"rope_type": "linear", "factor": 2.0, "alpha": 1}), "does not know: alpha"),
        (LLAMA_ROPE, dict(rope_scaling={"rope_type": "linear"}), "of type linear has no factor"),
        (LLAMA_ROPE, dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "no low_freq_factor, high_freq_factor"),
    ],
)  # fmt: skip
def test_refused(names: RopeNames, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(names, **values)


def test_linear() -> None:
    wanted = RopeScaling("linear", factor=4.0)
    assert scaling(factor=4.0) == scaling(type="linear", factor=4) == scaling(rope_type="linear", factor=4.0) == wanted


def test_dynamic_begins_beyond_the_longest_sequence() -> None:
    assert scaling(type="dynamic", factor=2.0) == RopeScaling("dynamic", factor=2.0, original_positions=MAX_POSITIONS)


def test_llama3() -> None:
    given = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
    assert scaling(**given, original_max_position_embeddings=64) == RopeScaling("llama3", 32.0, 64, 1.0, 4.0)
    assert scaling(**given).original_positions == MAX_POSITIONS


def test_yarn() -> None:
    given = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    own = RopeScaling("yarn", factor=4.0, original_positions=32)
    assert scaling(**given) == scaling(**given, attention_factor=0.1 * math.log(4) + 1) == own
    assert own.own_magnitude() == pytest.approx(1.138629, abs=1e-6)
    assert scaling(**given, attention_factor=1.0).own_magnitude() == 1
    assert scaling(**given, mscale=1.0, mscale_all_dim=1.0).own_magnitude() == 1
    ratio = (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert scaling(**given, mscale=1.0, mscale_all_dim=0.5).own_magnitude() == pytest.approx(ratio)
    assert scaling(rope_type="yarn", original_max_position_embeddings=32).factor == MAX_POSITIONS / 32
    ramp = scaling(**given, beta_fast=16, beta_slow=2, truncate=False)
    assert (ramp.beta_fast, ramp.beta_slow, ramp.truncate) == (16, 2, False)


def test_longrope() -> None:
    lists = dict(short_factor=[1.0, 2.0], long_factor=[3.0, 4.0])
    found = scaling(type="su", **lists, original_max_position_embeddings=32)
    assert found == scaling(rope_type="longrope", **lists, original_max_position_embeddings=32)
    assert (found.short_factors, found.long_factors) == ((1.0, 2.0), (3.0, 4.0))
    assert found.magnitude == math.sqrt(1 + math.log(MAX_POSITIONS / 32) / math.log(32))
    assert scaling(type="longrope", **lists).magnitude == 1
    assert scaling(type="longrope", **lists, attention_factor=1.5).magnitude == 1.5
    # at the top level it has the last word
    values = {"type": "longrope", **lists, "original_max_position_embeddings": 8}
    assert read(rope_scaling=values, original_max_position_embeddings=32)["rope_scaling"] == found
    whole = read_rope(Attributes({"rope_scaling": {"type": "su", **lists}, "original_max_position_embeddings": 4096}),
                      HEAD_DIM, 131_072, LLAMA_ROPE)  # fmt: skip
    assert whole["rope_scaling"].magnitude == pytest.approx(1.190238, abs=1e-6)


OLD, NEW = "rope_scaling rope_theta", "rope_parameters"
RULES = [
    RopeScaling(),
    RopeScaling("linear", factor=2.5),
    RopeScaling("dynamic", factor=2.0, original_positions=MAX_POSITIONS),
    RopeScaling("llama3", factor=8.0, original_positions=32, low_frequency_factor=1.0, high_frequency_factor=4.0),
    RopeScaling("yarn", factor=4.0, original_positions=32, beta_fast=16.0, truncate=False, magnitude=1.25),
    RopeScaling("yarn", factor=4.0, original_positions=32),
    RopeScaling("longrope", original_positions=32, magnitude=1.5, short_factors=(1.0,) * 8, long_factors=(2.0,) * 8),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
@pytest.mark.parametrize("spelling", [OLD, NEW, f"{NEW} {OLD}"])
def test_what_is_written_is_read_in_each_spelling(rule: RopeScaling, spelling: str) -> None:
    config = DecoderConfig(head_dim=HEAD_DIM, max_positions=MAX_POSITIONS, rope_scaling=rule, rope_base=5e5)
    written = write_rope(config, LLAMA_ROPE)
    kept = {name: written[name] for name in [*spelling.split(), "original_max_position_embeddings"] if name in written}
    assert read(**kept) == dict(rope_base=5e5, rope_scaling=rule, rotary_dim=HEAD_DIM)


@pytest.mark.parametrize("head_dim", range(2, 322, 10))
def test_every_rotated_part_has_a_share(head_dim: int) -> None:
    for rotary_dim in range(2, head_dim + 1, 2):
        config = DecoderConfig(head_dim=head_dim, rotary_dim=rotary_dim)
        written = write_rope(config, NEOX)
        assert read_rope(Attributes(written), head_dim, MAX_POSITIONS, NEOX)["rotary_dim"] == rotary_dim
