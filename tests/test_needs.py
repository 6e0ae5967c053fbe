"""What people report of backends like this one, need by need, and the tests that hold its whole kind here.

The needs are those of 252 public reports, counted and put in order; the numbers are theirs.
"""

import ast
from pathlib import Path

import pytest

NEEDS = {
    1: (
        "the same numbers as CPU PyTorch, or a loud error",
        {
            "test_op_db_a": (), "test_op_db_b": (), "test_op_db_c": (), "test_op_db_d": (),
            "test_random_programs": ("test_in_strict_mode", "test_in_fused_mode", "test_in_debug_mode", "test_as_one_compiled_function"),
            "test_lowerings_a": (), "test_lowerings_b": (), "test_lowerings_data": (), "test_lowerings_lists_linalg": (),
            "test_lowerings_rows": (), "test_index_errors": (), "test_refusals": (), "test_refused_as_on_cpu": (),
            "test_hub_models": (), "test_hub_generate": (), "test_training": (), "test_scalars_in_shapes": (), "test_trace_truth": (),
        },
    ),
    2: (
        "op coverage with backward, and messages that name the user's call",
        {
            "test_coverage": (), "test_asked_gradients": (),
            "test_device_mistakes": ("test_an_op_without_lowering_names_the_call_and_the_line", "test_a_wrong_call_raises_what_the_cpu_raises"),
            "test_failures": ("test_an_op_without_a_lowering_runs_on_the_cpu_in_every_mode", "test_a_wrong_op_raises_at_its_call_and_others_go_on"),
        },
    ),
    6: (
        "honest dtypes and a visible matmul precision",
        {
            "test_precision": (), "test_autograd_friends": ("test_autocast_is_bfloat16_by_default_and_agrees_with_the_cpus",),
            "test_device": ("test_precision_takes_its_modes_and_torchs_switch",),
        },
    ),
    7: (
        "torch.compile that keeps in-place semantics and plays with others",
        {
            "test_compile": ("test_input_mutation", "test_mutation_through_views_of_inputs", "test_two_arguments_on_one_storage", "test_conv_batchnorm_buffers_mutate_once"),
            "test_compile_calls": (
                "test_an_input_written_with_its_own_value_stays", "test_cpu_users_see_no_change", "test_default_backend_and_modes",
                "test_functions_of_a_notebook_cell", "test_tensors_made_on_the_cpu_inside",
            ),
        },
    ),
    8: (
        "memory that stays flat, and out-of-memory messages in plain words",
        {
            "test_out_of_memory": (), "test_device": ("test_many_ops_and_steps_leave_memory_flat",), "test_rerun": (), "test_long_trace": (),
            "test_disk_cache": ("test_the_size_is_bounded_and_the_least_recently_used_go_first",),
        },
    ),
    9: (
        "views and in-place updates that behave like memory",
        {"test_views_inplace": (), "test_window": (), "test_random_programs": ("test_in_fused_mode",)},
    ),
    11: (
        "models that can be moved, tied, copied, saved and opened elsewhere",
        {"test_serialization": (), "test_hub_libraries": (), "test_compile": ("test_tied_weights",), "test_autograd_friends": ("test_checkpointed_tied_weights_get_their_gradient",)},
    ),
    12: (
        "data-dependent shapes that work and say what they cost",
        {
            "test_scalars_in_shapes": (), "test_compile_calls": ("test_dynamic_shapes_compile_once_a_shape", "test_graph_break_with_item"),
            "test_causes": (), "test_no_recompile": (), "test_showcase_models": (),
        },
    ),
    13: (
        "random numbers: seed, state, fork, replay, never frozen into a program",
        {
            "test_device_mistakes": ("test_manual_seed_seeds_the_device_and_states_restore", "test_generators_of_the_cpu_serve_and_repeat"),
            "test_autograd_friends": ("test_checkpoint_repeats_the_dropout_mask",),
            "test_compile": ("test_dropout_masks_agree_between_forward_and_backward_and_differ_between_calls", "test_checkpoint_inside_keeps_its_masks"),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("number", NEEDS)
def test_the_tests_of_a_need_exist(number):
    words, files = NEEDS[number]
    assert words and files
    for name, wanted in files.items():
        tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
        there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
        there |= {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)}
        assert there, name
        assert not set(wanted) - there, name
