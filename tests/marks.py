"""Marks of tests: `make long` runs those that are `long`, and `make test` the others.

A long case takes seconds, and proves for one more model what others prove.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest


def long(*values: Any) -> Any:
    """A case of `parametrize` that is run by `make long`."""
    return pytest.param(*values, marks=pytest.mark.long)


def sampled(cases: Iterable[Any], rest: Iterable[Any]) -> list[Any]:
    """The cases, those in `rest` as long ones."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    known = [case if isinstance(case, tuple) else (case,) for case in rest]
    return [long(*case) if case in known else pytest.param(*case) for case in values]


LONG = tuple(
    """
architectures/test_context_parallel.py::test_copies_in_fsdp2_train_as_the_whole_model
architectures/test_context_parallel.py::test_equals_the_whole_model[phi3-1-True]
architectures/test_decoding.py::test_embeddings_are_proven_where_a_step_takes_one_token_alone
architectures/test_decoding.py::test_embeddings_are_proven_where_no_cache_is_left
architectures/test_decoding.py::test_steps_equal_those_of_the_whole_model[bamba-2]
architectures/test_decoding.py::test_steps_equal_those_of_the_whole_model[mamba2-2]
architectures/test_decoding.py::test_steps_equal_those_of_the_whole_model[t5-2]
architectures/test_equal.py::test_equal_in_float64[causal-gemma2]
architectures/test_equal.py::test_equal_in_float64[causal-gpt_neox]
architectures/test_equal.py::test_equal_in_float64[causal-olmo2]
architectures/test_equal.py::test_equal_in_float64[causal-phi3]
architectures/test_equal.py::test_equal_in_float64[masked-bert]
architectures/test_equal.py::test_parallel_attention_and_mlp_share_an_all_reduce[cohere]
architectures/test_experts.py::test_experts_equal_the_whole_model[deepseek_v3]
architectures/test_foreign.py::test_split_and_equal[diffusers/dit]
architectures/test_hashed.py
architectures/test_heads.py::test_equal_in_float64[4 kv heads over 8]
architectures/test_heads.py::test_equal_in_float64[50257 words over 8]
architectures/test_mesh.py::test_gradients_are_those_of_the_whole_batch[mesh1-2]
architectures/test_mesh.py::test_gradients_are_those_of_the_whole_batch[mesh2-4]
architectures/test_mesh.py::test_gradients_are_those_of_the_whole_batch[mesh3-4]
architectures/test_predictions.py::test_predictions_are_exact[llama-2]
architectures/test_pipelines.py::test_a_plan_is_for_one_config
architectures/test_pipelines.py::test_images_of_a_split_denoiser[pixart]
architectures/test_pipelines.py::test_images_of_a_split_denoiser[sd3]
architectures/test_pipelines.py::test_images_of_a_split_denoiser[sdxl]
architectures/test_pipelines.py::test_images_of_a_split_denoiser[sd]
architectures/test_pipelines.py::test_images_of_a_split_denoiser[wan]
architectures/test_pipelines.py::test_timm_by_name_and_by_directory
architectures/test_pipelines.py::test_what_a_split_autoencoder_encodes_and_decodes
architectures/test_predictions.py::test_predictions_are_exact[olmo2-3]
architectures/test_predictions.py::test_predictions_are_exact[phi3-2]
architectures/test_predictions.py::test_predictions_are_exact[t5-2]
architectures/test_provers.py::test_all_solvers_prove_the_same_plan[causal-bloom]
architectures/test_provers.py::test_all_solvers_prove_the_same_plan[causal-gemma2]
architectures/test_provers.py::test_all_solvers_prove_the_same_plan[masked-bert]
architectures/test_provers.py::test_all_solvers_prove_the_same_plan[seq2seq-t5]
architectures/test_sample.py::test_equals_the_whole_model[causal-mixtral]
architectures/test_sample.py::test_equals_the_whole_model[causal-qwen3_next]
architectures/test_sample.py::test_equals_the_whole_model[masked-deberta-v2]
architectures/test_sequence_parallel.py::test_equals_the_whole_model[gpt2-4]
architectures/test_sequence_parallel.py::test_equals_the_whole_model[llama-4]
architectures/test_sequence_parallel.py::test_fewer_bytes_are_kept_for_the_backward_pass[gpt2]
architectures/test_sequence_parallel.py::test_fewer_bytes_are_kept_for_the_backward_pass[llama]
architectures/test_sequence_parallel.py::test_memory_asks_for_it
architectures/test_sequence_parallel.py::test_memory_asks_for_what_cannot_be
architectures/test_unused.py::test_a_decoder_with_and_without_an_encoder[trocr]
architectures/test_unused.py::test_a_tower_by_itself_and_in_its_model
architectures/test_unused.py::test_a_tower_with_masks_of_counted_rows
checkpoint/test_boxes.py::test_random_ranges[8]
checkpoint/test_conversion.py::test_under_a_plan[4]
checkpoint/test_hub.py::test_each_revision_is_planned_checked_explained_and_loaded
cli/test_bad_values.py::test_names_of_any_length_in_an_index
cli/test_calibrate.py::test_two_hosts_have_links_within_and_between
cli/test_check.py::test_a_plan_of_an_older_release_is_accepted_once_it_was_proven[2]
cli/test_check.py::test_an_edit_that_is_right_is_accepted_with_its_own_figures
cli/test_check.py::test_figures_that_are_not_what_comes_out_are_named
cli/test_check.py::test_numeric_with_layers_planned_anew
cli/test_errors.py::test_error_of_one_rank_comes_before_what_it_led_to
cli/test_errors.py::test_infeasible_budget_says_the_least_that_would_fit[arguments0]
cli/test_errors.py::test_infeasible_budget_says_the_least_that_would_fit[arguments1]
cli/test_errors.py::test_rank_that_dies_in_forward_ends_the_rest
cli/test_errors.py::test_two_processes_for_a_plan_for_three
cli/test_explain.py::test_a_layer_that_was_folded_into_another
cli/test_explain.py::test_a_pin_is_the_reason
cli/test_explain.py::test_an_axis_that_is_too_short_is_said_to_be
cli/test_explain.py::test_what_has_the_same_axis_is_tied_by_a_chain_of_ops
cli/test_explain.py::test_what_is_chosen_has_a_price_for_each_alternative
cli/test_inputs.py::test_a_config_that_names_no_class
cli/test_inputs.py::test_a_module_at_hand_on_ranks
cli/test_inputs.py::test_a_module_of_ones_own
cli/test_terminal.py::test_a_home_that_cannot_be_written
cli/test_terminal.py::test_a_reader_that_has_read_enough
cli/test_tp_plan.py::test_both_side_by_side
cli/test_trust.py::test_trust_reaches_nested_configs
cli/test_write_model.py::test_the_model_names_axes_and_has_the_plans_optimum[more0]
end_to_end/test_composed.py::test_tools_of_others
end_to_end/test_examples.py::test_a_run_goes_on_in_another_layout
end_to_end/test_examples.py::test_example[generate]
end_to_end/test_examples.py::test_example[lora]
end_to_end/test_examples.py::test_example[pipeline]
end_to_end/test_examples.py::test_example[trainer]
end_to_end/test_exports.py::test_a_wrong_table_is_seen
end_to_end/test_exports.py::test_torch_runs_what_is_written_for_it
end_to_end/test_exports.py::test_transformers_carries_out_a_whole_plan
end_to_end/test_loops.py::test_adapters
end_to_end/test_loops.py::test_trainer[2]
end_to_end/test_loops.py::test_trainer[4]
end_to_end/test_quantized.py::test_adapters_train_over_frozen_weights
end_to_end/test_quantized.py::test_equal_to_one_process[fused and tied-int4-3]
end_to_end/test_quantized.py::test_equal_to_one_process[mixture-int4-3]
end_to_end/test_quantized.py::test_explain_says_where_cuts_fall
end_to_end/test_quantized.py::test_saved_as_stored[fp8]
end_to_end/test_quantized.py::test_saved_as_stored[int4]
end_to_end/test_quantized.py::test_saved_dense
end_to_end/test_random_numbers.py::test_ranks_draw_what_the_unsplit_model_draws
end_to_end/test_ranks.py
end_to_end/test_stock.py::test_fsdp2_clipping_and_distributed_checkpoints
end_to_end/test_uses.py::test_equals_the_whole_model_or_is_refused[masked/bert-3-last_hidden_state]
end_to_end/test_uses.py::test_equals_the_whole_model_or_is_refused[masked/bert-3-lora_before_splitting]
end_to_end/test_whole_model.py::test_attention_weights_are_refused[gpt2]
end_to_end/test_whole_model.py::test_attention_weights_are_refused[gpt_neox]
end_to_end/test_whole_model.py::test_compiled_equals_eager
end_to_end/test_whole_model.py::test_decode_steps_are_one_compiled_graph
end_to_end/test_whole_model.py::test_hidden_states_are_whole[bert]
end_to_end/test_whole_model.py::test_hidden_states_are_whole[phi3]
end_to_end/test_without_plan.py::test_dtype_by_name[float16]
end_to_end/test_without_plan.py::test_dtype_by_name[float32]
end_to_end/test_without_plan.py::test_dtype_by_name[torch.float64]
end_to_end/test_without_plan.py::test_load_plans[4-how2]
faults/test_blame.py::test_all_name_the_one_that_died[0]
faults/test_blame.py::test_one_that_hangs
faults/test_kills.py::test_a_rank_is_killed[0]
faults/test_long_run.py::test_nothing_grows
faults/test_orphans.py::test_check_leaves_no_ranks[SIGTERM]
faults/test_restart.py::test_rank_0_does_not_come_again
faults/test_restart.py::test_ranks_start_again_after_one_was_killed[0]
faults/test_start.py::test_a_rank_that_does_not_come_is_named[dies_before_it_comes-plan-4.json]
faults/test_start.py::test_a_rank_that_does_not_come_is_named[dies_when_all_have_come
faults/test_strangers.py::test_nothing_of_a_stranger_runs[apply in a group of torch's]
faults/test_strangers.py::test_nothing_of_a_stranger_runs[check --numeric]
picture/test_drawing.py::test_figures_add_up_to_the_prediction[causal-deepseek_v3-workload1]
picture/test_drawing.py::test_figures_add_up_to_the_prediction[seq2seq-t5-workload2]
picture/test_drawing.py::test_parts_of_a_fused_projection_are_named[falcon]
picture/test_page.py::test_numbers_are_those_of_the_plan
planner/test_alignment.py::test_uneven_experts_keep_rows_of_16_bytes
planner/test_audit.py::test_right_tables_give_no_alarm[deepseek_v3]
planner/test_audit.py::test_right_tables_give_no_alarm[phi3]
planner/test_audit.py::test_what_is_wrong_in_transformers[doge-
planner/test_block_dedup.py::test_blocks_that_ask_for_their_number_are_not_folded[looks up in a li
planner/test_chains.py::test_backtracking_proves_a_chain_of_32_layers_at_every_budget
planner/test_concurrent_plans.py::test_plans_of_several_models_in_threads[modules]
planner/test_concurrent_plans.py::test_plans_of_several_models_in_threads[text]
planner/test_concurrent_plans.py::test_plans_of_the_same_module_in_threads
planner/test_conventions.py::test_a_budget_goes_first
planner/test_conventions.py::test_a_dense_decoder_is_split_as_by_hand[LlamaForCausalLM-70B-8]
planner/test_conventions.py::test_a_dense_decoder_is_split_as_by_hand[MistralForCausalLM-tiny-4]
planner/test_conventions.py::test_a_pin_overrides_it[replicate-None]
planner/test_conventions.py::test_a_pin_overrides_it[shard:1-1]
planner/test_conventions.py::test_in_every_phase[decode]
planner/test_conventions.py::test_slack_is_not_spent_on_attention[Olmo2ForCausalLM]
planner/test_conventions.py::test_solvers_agree
planner/test_conventions.py::test_within_a_budget_attention_may_be_whole
planner/test_data_loops.py::test_other_loops_are_left_whole[KeptByAnother]
planner/test_data_loops.py::test_other_loops_are_left_whole[OfTokens]
planner/test_data_masks.py::test_code_may_ask_whether_there_are_any[0-Counts]
planner/test_data_masks.py::test_code_may_ask_whether_there_are_any[1-CountsTokens]
planner/test_data_masks.py::test_code_may_ask_whether_there_are_any[1-Elements]
planner/test_data_numbers.py::test_a_question_with_one_way_on_is_no_branch[Asserts]
planner/test_determinism.py::test_plans_do_not_hang_on_the_seed_of_hashes_or_on_the_run
planner/test_dump.py::test_it_is_written_where_there_is_no_plan
planner/test_few_classes.py::test_a_model_of_transformers[3-False]
planner/test_flex_attention.py::test_own_modules[Capped]
planner/test_flex_attention.py::test_own_modules[Layers]
planner/test_flex_attention.py::test_own_modules[Windowed]
planner/test_flex_attention.py::test_stock_models[Mistral]
planner/test_folding.py::test_folded_equals_unfolded[deepseek_v3]
planner/test_folding.py::test_folded_equals_unfolded[gemma2]
planner/test_folding.py::test_folded_equals_unfolded[gpt2]
planner/test_folding.py::test_folded_equals_unfolded[t5]
planner/test_folding.py::test_three_blocks_in_a_row_hold_as_much_as_all[deepseek_v3]
planner/test_folding.py::test_three_blocks_in_a_row_hold_as_much_as_all[gemma2]
planner/test_folding.py::test_three_blocks_in_a_row_hold_as_much_as_all[llama]
planner/test_from_config.py::test_planned_from_a_config_and_equal[no size]
planner/test_from_config.py::test_planned_from_a_config_and_equal[padded patches]
planner/test_from_config.py::test_planned_from_a_config_and_equal[tokens of several kinds]
planner/test_hand_written.py::test_collectives_are_those_that_transformers_makes[deepseek
planner/test_hand_written.py::test_collectives_are_those_that_transformers_makes[longcat_flash
planner/test_hand_written.py::test_collectives_are_those_that_transformers_makes[olmo2-counts2]
planner/test_hand_written.py::test_collectives_are_those_that_transformers_makes[phi3-counts1]
planner/test_hand_written.py::test_plans_as_pins
planner/test_hand_written.py::test_rows_of_fused_parts_are_no_plain_shards
planner/test_hand_written.py::test_the_hand_written_plan_costs_what_it_costs_and_ours_no_more
planner/test_hand_written.py::test_who_sums_the_gradient_of_a_shared_key
planner/test_higher_order.py::test_planned[Compiled]
planner/test_integer_caches.py::test_layers_that_share_a_cache_are_split_alike
planner/test_integer_caches.py::test_vision_transformers
planner/test_ladder.py::test_attention_is_split_in_a_second_attempt
planner/test_ladder.py::test_over_memory_all_else_is_tried_before_the_sequence
planner/test_ladder.py::test_telling_changes_nothing
planner/test_ladder.py::test_the_first_solution_may_do
planner/test_memory.py::test_a_budget_holds_for_all_of_it
planner/test_memory.py::test_more_ranks_hold_less_each
planner/test_meshes.py::test_ranks_past_the_devices_of_a_host_are_on_others
planner/test_meshes.py::test_the_chosen_mesh_is_the_best_of_all[how0]
planner/test_meshes.py::test_the_chosen_mesh_is_the_best_of_all[how1]
planner/test_meshes.py::test_the_chosen_mesh_is_the_best_of_all[how2]
planner/test_meshes.py::test_the_chosen_mesh_is_the_best_of_all[how3]
planner/test_meshes.py::test_what_crosses_hosts_is_counted_apart
planner/test_multimodal.py::test_generate_with_a_cache[llava-False]
planner/test_multimodal.py::test_generate_with_a_cache[paligemma-False]
planner/test_multimodal.py::test_generate_with_a_cache[qwen2_5_vl-True]
planner/test_multimodal.py::test_split_and_equal[clip]
planner/test_multimodal.py::test_split_and_equal[llava]
planner/test_multimodal.py::test_split_and_equal[paligemma]
planner/test_multimodal.py::test_split_and_equal[qwen2_5_vl]
planner/test_multimodal.py::test_split_and_equal[whisper]
planner/test_objective.py::test_few_key_heads_are_shared_by_ranks
planner/test_objective.py::test_no_plan_is_past_what_a_rank_may_hold
planner/test_objective.py::test_provers_agree
planner/test_off_inputs.py::test_split_as_with_attributes_and_equal[Swin-2]
planner/test_off_inputs.py::test_split_as_with_attributes_and_equal[ViT-2]
planner/test_off_inputs.py::test_split_as_with_attributes_and_equal[nanoGPT-2]
planner/test_padding_folded.py::test_blocks_that_are_read_from_afar_are_not_folded[001001--3]
planner/test_skips.py::test_blocks_that_code_goes_around[Dropped-3]
planner/test_skips.py::test_blocks_that_code_goes_around[Flagged-2]
planner/test_skips.py::test_blocks_that_code_goes_around[Passed-3]
planner/test_skips.py::test_the_root_itself[ByCounts-3]
planner/test_skips.py::test_what_more_depends_on_stays_whole
planner/test_stock_tables.py::test_a_table_is_that_which_people_wrote[mixtral]
planner/test_stock_tables.py::test_a_table_is_that_which_people_wrote[qwen2]
planner/test_stock_tables.py::test_layers_that_share_a_name_share_a_style
planner/test_stock_tables.py::test_what_is_not_seen_to_be_right_is_not_exported[ran4
planner/test_stock_tables.py::test_who_sums_a_gradient
planner/test_toys.py::test_each_component_alone[parallel-0-cpsat]
planner/test_toys.py::test_each_component_alone[parallel-1-cpsat]
planner/test_toys.py::test_presolve_loses_no_plan[heads]
planner/test_training_mode.py::test_text_models_are_proven_in_both[bart]
planner/test_training_mode.py::test_text_models_are_proven_in_both[mixtral]
runtime/test_calls_of_a_step.py::test_a_step_takes_few_more_calls_than_unsplit[mixtral]
runtime/test_calls_of_a_step.py::test_a_step_takes_few_more_calls_than_unsplit[phi3]
runtime/test_compile.py::test_losses_of_split_logits[<lambda>0]
runtime/test_compile.py::test_losses_of_split_logits[shifted]
runtime/test_dtensors.py::test_clipping_takes_the_norm_of_the_whole[llama-2]
runtime/test_dtensors.py::test_penalties_join_a_loss[llama]
runtime/test_dtensors.py::test_whole_tensors_are_split_as_parameters_are[gpt2-3]
runtime/test_fsdp.py::test_gradients_are_those_of_the_unsplit_model[compiled]
runtime/test_fsdp.py::test_gradients_are_those_of_the_unsplit_model[gradient checkpointing]
runtime/test_kept_tensors.py::test_what_modules_keep_is_whole_behind_a_call[mixture alone-2]
runtime/test_llama.py::test_compile
runtime/test_newcomers.py::test_what_comes_in_computes_with_whole_tensors[gpt2]
runtime/test_parametrized.py::test_adapters_on_routers_and_experts_train_as_those_of_the_whole[3-Exp
runtime/test_replicas.py::test_a_model_that_was_changed_since_is_averaged[_as_it_is-False]
runtime/test_replicas.py::test_a_model_that_was_changed_since_is_averaged[_loaded-False]
runtime/test_replicas.py::test_a_model_that_was_changed_since_is_averaged[deepcopy-True]
runtime/test_settings.py::test_what_was_given_by_name_is_to_be_given_so
runtime/test_shared_memory.py::test_a_library_of_another_owner_is_not_loaded[a link]
runtime/test_shared_memory.py::test_a_library_of_another_owner_is_not_loaded[the file]
runtime/test_shared_memory.py::test_a_library_that_is_none_is_compiled_anew[\\x7fELF]
runtime/test_shared_memory.py::test_a_library_that_others_can_write_is_compiled_anew[495]
runtime/test_shared_memory.py::test_a_library_that_others_can_write_is_compiled_anew[511]
runtime/test_shared_memory.py::test_results_are_those_of_torch_on_all_ranks
serving/test_serve.py::test_a_rank_that_dies_ends_the_server
test_decompose.py
test_docs.py::test_blocks_run[docs/errors.md]
test_docs.py::test_blocks_run[docs/migration.md]
test_docs.py::test_blocks_run[docs/recipes/export.md]
test_docs.py::test_blocks_run[docs/recipes/fine-tune.md]
test_docs.py::test_blocks_run[docs/recipes/images.md]
test_docs.py::test_blocks_run[docs/recipes/several-hosts.md]
test_docs.py::test_blocks_run[docs/recipes/wrong-plan.md]
test_faults.py::test_mutated_plans[shared kv heads]
torch_nn/test_torch_nn.py::test_equals_the_whole_model[nn.GRU-2]
torch_nn/test_torch_nn.py::test_equals_the_whole_model[nn.LSTM-3]
torch_nn/test_torch_nn.py::test_equals_the_whole_model[nn.RNN-3]
""".strip().split("\n")
)
"""How names of tests begin that take many seconds, and whose subjects shorter ones cover too."""


HALF = """
architectures/test_context_parallel.py::test_equals_the_whole_model
architectures/test_decoding.py::test_steps_equal_those_of_the_whole_model
architectures/test_equal.py::test_equal_in_float64
architectures/test_foreign.py::test_split_and_equal
architectures/test_heads.py::test_equal_in_float64
architectures/test_predictions.py::test_predictions_are_exact
architectures/test_provers.py::test_all_solvers_prove_the_same_plan
architectures/test_sample.py::test_equals_the_whole_model
end_to_end/test_quantized.py::test_equal_to_one_process
end_to_end/test_torchrun.py::test_a_decoder_on_two_ranks
end_to_end/test_uses.py::test_equals_the_whole_model_or_is_refused
end_to_end/test_whole_model.py::test_decode_steps_are_one_compiled_graph
end_to_end/test_whole_model.py::test_hidden_states_are_whole
end_to_end/test_without_plan.py::test_load_plans
faults/test_kills.py::test_a_rank_is_killed
planner/test_conventions.py::test_a_dense_decoder_is_split_as_by_hand
planner/test_data_loops.py::test_experts_of_a_loop_are_split
planner/test_off_inputs.py::test_split_as_with_attributes_and_equal
planner/test_python.py::test_equals_the_whole_model
planner/test_search.py::test_equals_the_whole_module
planner/test_skips.py::test_experts_are_split
planner/test_toys.py::test_each_component_alone
planner/test_toys.py::test_presolve_loses_no_plan
runtime/test_compile.py::test_losses_of_split_logits
runtime/test_dtensors.py::test_changes_after_splitting_are_refused
runtime/test_dtensors.py::test_clipping_takes_the_norm_of_the_whole
runtime/test_fsdp.py::test_gradients_are_those_of_the_unsplit_model
runtime/test_kept_tensors.py::test_what_modules_keep_is_whole_behind_a_call
runtime/test_replicas.py::test_a_model_that_was_changed_since_is_averaged
""".split()
"""Tests of which every second case is long."""


def are_long(names: Iterable[str]) -> Iterator[bool]:
    """Yield for each test, by its full name, whether it is in `LONG` or a second case in `HALF`."""
    cases: Counter[str] = Counter()
    for name in names:
        name = name.removeprefix("tests/")
        test = name.partition("[")[0]
        cases[test] += 1
        yield name.startswith(LONG) or (test in HALF and cases[test] % 2 == 0)
