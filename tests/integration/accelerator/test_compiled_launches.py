"""What programs launch, as `experiments/accelerator/launches.py` counts it."""

import json

import jax
import jax.numpy as jnp

from experiments.accelerator.launches import main
from experiments.accelerator.reading import (
    count_grouped_convolutions,
    parse_command_buffers,
    parse_loop_bodies,
)

PROGRAM = """HloModule jit_f, is_scheduled=true

%step (arg: (s32[], f32[2,3])) -> (s32[], f32[2,3]) {
  %arg = (s32[], f32[2,3]{1,0}) parameter(0)
  %f = f32[2,3]{1,0} fusion(%arg), kind=kLoop, calls=%fused
  %c = (f32[4]{0}, s8[16]{0}) custom-call(%f), custom_call_target="__cudnn$convForward"
  ROOT %t = (s32[], f32[2,3]{1,0}) tuple(%f)
}

%test (arg.1: (s32[], f32[2,3])) -> pred[] {
  ROOT %less = pred[] compare(%arg.1), direction=LT
}

%one (p: f32[]) -> f32[] {
  ROOT %n = f32[] negate(%p)
}

%two (p.1: f32[]) -> f32[] {
  %a = f32[] negate(%p.1)
  ROOT %b = f32[] negate(%a)
}

%round (arg.2: (s32[], f32[2,3])) -> (s32[], f32[2,3]) {
  %w = (s32[], f32[2,3]) while(%x), condition=%test, body=%step, c={"known_trip_count":{"n":"20"}}
  %k = f32[] conditional(%p), branch_computations={%one, %two}
  %sum = (f32[10]{0}, bf16[3]{0}) all-reduce-start(%k, %k), to_apply=%one
  %done = (f32[10]{0}, bf16[3]{0}) all-reduce-done(%sum)
  ROOT %v = f32[8,8]{1,0} convolution(%k), window={size=3x3}, feature_group_count=32
}

ENTRY %main (p.2: f32[]) -> f32[] {
  %p.2 = f32[] parameter(0)
  ROOT %w2 = (s32[], f32[2,3]{1,0}) while(%y), condition=%test, body=%round
}
"""

THUNKS = """000: kCommandBuffer [source       | next=003 (1)]
    001: kCopy [source | sink] kCopy
003: kWhile         [prev=000 (1) | sink        ]
condition:
    004: kCustomKernel [source | sink] wrapped_compare
  body:
    005: kCommandBuffer [source       | next=013 (1)]
        006: kWhile [source       | sink        ] loop
            007: kCustomKernel [source | sink] inside
    008: kConditional [source | sink]
"""


def test_launches_by_loop():
    outside, a_round, step = parse_loop_bodies(PROGRAM)
    assert (outside.depth, a_round.depth, step.depth) == (0, 1, 2)
    assert (outside.trips, a_round.trips, step.trips) == (None, None, 20)
    # Of a branch the longest; what is waited for is not started again.
    assert [body.launches for body in (outside, a_round, step)] == [0, 2 + 2, 2]
    assert a_round.conditionals == 1 and step.conditionals == 0
    assert a_round.collectives == {"all-reduce": 1}
    assert a_round.collective_bytes == 4 * 10 + 2 * 3
    assert step.kinds == {"fusion": 1, "custom-call:__cudnn$convForward": 1}
    assert count_grouped_convolutions(PROGRAM) == 1


def test_command_buffers():
    assert parse_command_buffers(THUNKS) == {"graphs": 2, "whole": False, "host_reads": 2}
    whole = "\n".join(["000: kCommandBuffer [source | sink]", "    001: kWhile [source | sink]"])
    assert parse_command_buffers(whole) == {"graphs": 1, "whole": True, "host_reads": 0}


def test_loop_bodies_of_compiled_program():
    def nested(x):
        def inner(i, x):
            return jnp.sin(x @ x)

        return jax.lax.fori_loop(0, 3, lambda i, x: jax.lax.fori_loop(0, 5, inner, x) + 1, x)

    text = jax.jit(nested).lower(jnp.ones((64, 64))).compile().as_text()
    bodies = parse_loop_bodies(text)
    assert [body.depth for body in bodies] == [0, 1, 2]
    assert [body.trips for body in bodies[1:]] == [3, 5]
    assert 1 <= bodies[2].launches <= 6


def test_command_counts_launches(tmp_path, capsys):
    output = tmp_path / "counts.json"
    words = ["--target", "cpu", "--small", "--programs", "mlp-1", "--output", str(output)]
    assert main(words) == 0
    actual = json.loads(output.read_text())["cpu"]["mlp-1"]
    # Rounds, in them segments, in these the steps, which have products of matrices.
    assert [body["launches"] for body in actual["bodies"] if body["depth"] == 3] == (
        actual["step_launches"]
    )
    assert len(actual["step_launches"]) == 1 and actual["step_launches"][0] > 8
    assert actual["temp_mb"] > 0 and actual["argument_mb"] > 0
    assert "mlp-1" in capsys.readouterr().out


def test_command_rejects_unknown_program(capsys):
    assert main(["--target", "cpu", "--programs", "mlp-3"]) == 2
    assert "mlp-3" in (said := capsys.readouterr().err) and "mlp-32" in said
    assert main(["--target", "h200", "--programs", "two-mlp"]) == 2
    assert "at most 1 devices" in capsys.readouterr().err
