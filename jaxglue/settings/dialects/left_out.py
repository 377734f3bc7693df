"""Settings of other programs that have no place here, with the reason."""

from typing import Any

_REASONS = {
    "documents are always packed, and see only themselves": (
        *("packing", "sample_packing", "eval_sample_packing", "pad_to_sequence_len", "neat_packing", "group_by_length"),
        *("padding_free", "multipack_real_batches", "remove_unused_columns", "dataloader_num_workers"),
        *("dataloader_prefetch_factor", "dataloader_pin_memory", "pad_to_multiple_of", "packing_strategy"),
        *("eval_packing", "length_column_name", "eval_sequence_len", "sample_packing_bin_size"),
        *("sample_packing_group_size", "dataloader_drop_last"),
        *("sample_packing_sequentially", "sample_packing_mp_start_method", "batch_flattening"),
        *("pretrain_multipack_attn", "pretrain_multipack_buffer_size", "streaming_multipack_buffer_size"),
        *("sample_packing_eff_est", "ignore_pad_token_for_loss", "preprocessing_batch_size", "buffer_size"),
        *("total_num_tokens", "data_shared_file_system", "dpo_padding_free"),
        *("skip_prepare_dataset", "lazy_tokenize", "packing_length", "packing_num_proc", "batching_workers"),
    ),
    "--remat decides what is recomputed": (
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "use_gradient_checkpointing"),
        *("activation_offloading", "disable_gradient_checkpointing"),
        *("enable_activation_checkpointing", "enable_activation_offloading", "ac_mode", "ac_option"),
        *("activation_checkpointing", "activation_checkpointing_kwargs", "use_cache", "selective_checkpointing"),
        *("layer_offloading", "use_unsloth_gc", "use_reentrant_gc", "use_kv_cache"),
        *("recompute_granularity", "recompute_method", "recompute_num_layers", "vit_gradient_checkpointing"),
    ),
    "--attention chooses the kernel; auto takes the fastest": (
        *("attn_implementation", "flash_attention", "flash_attn", "sdp_attention", "xformers_attention"),
        *("flex_attention", "eager_attention", "use_eager_attention", "sage_attention", "attn_impl"),
        *("gemma4_hybrid_attn_impl", "attention_backend"),
    ),
    "kernels are chosen by GPU and shape": (
        *(
            "tf32",
            "liger_kernel",
            "use_liger",
            "use_liger_kernel",
            "enable_liger_kernel",
            "torch_compile",
            "plugins",
            "liger_rope",
        ),
        *("liger_rms_norm", "liger_glu_activation", "liger_swiglu", "liger_layer_norm", "cut_cross_entropy"),
        *("liger_fused_linear_cross_entropy", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"),
        *("use_unsloth", "use_logits_to_keep", "fused_attn_kernel", "use_kernels", "torch_compile_mode"),
        *("torch_compile_backend", "flex_attn_compile_kwargs", "cross_entropy_loss_fusion", "use_v1_kernels"),
        *("liger_kernel_config", "torch_empty_cache_steps", "gc_steps", "gc_collect_steps", "enable_jit_checkpoint"),
        *("flash_attn_cross_entropy", "flash_attn_fuse_mlp", "flash_attn_rms_norm", "flash_optimum"),
        *("lora_embedding_kernel", "chunked_cross_entropy", "chunked_cross_entropy_num_chunks", "tiled_mlp"),
        *("tiled_mlp_num_shards", "tiled_mlp_use_original_mlp", "deepcompile", "torch_compile_options"),
        *("dpo_use_liger_kernel", "dpo_use_logits_to_keep", "precompute_ref_batch_size", "flash_attn_d512"),
        *("sdpa_varlen", "large_head_attention", "use_scattermoe", "use_sonicmoe", "liger_rms_norm_gated"),
        *("use_dsv4_kernels", "dsv4_fp4_grouped_mode", "use_glm_dsa_kernels", "experts_impl", "moe_grouped_gemm"),
        *("tuner_backend", "unsloth_force_compile", "unsloth_tiled_mlp", "llama4_linearized_experts"),
        *("bias_activation_fusion", "apply_rope_fusion", "moe_token_dispatcher_type", "moe_permute_fusion"),
        *("moe_shared_expert_overlap", "fp8_backend", "fp8_enable_fsdp_float8_all_gather"),
    ),
    "--mesh says how GPUs share the work": (
        *("deepspeed", "fsdp", "fsdp_config", "fsdp_version", "ddp_timeout", "ddp", "ddp_find_unused_parameters"),
        *("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree", "ddp_bucket_cap_mb"),
        *("ddp_broadcast_buffers", "ignore_bias_buffers", "gpus", "num_gpus", "n_gpu", "num_processes"),
        *("expert_parallel_size", "experts_implementation", "world_size", "nproc_per_node", "dp_shard_size"),
        *("dp_replicate_size", "use_ray", "ray_num_workers", "accelerator_config", "parallelism_config"),
        *("heads_k_stride", "ring_attn_func", "resources_per_worker", "master_addr", "master_port"),
        *("custom_sharded_layers", "tensor_parallel_dim", "tensor_parallel_plan", "context_parallel_dim"),
        *("data_parallel_shard_dim", "data_parallel_replicate_dim", "expert_parallel_num_nvl_bytes"),
        *("expert_parallel_token_capacity", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
        *("expert_model_parallel_size", "sequence_parallel", "sequence_parallel_size", "use_distributed_optimizer"),
        *("overlap_param_gather", "overlap_grad_reduce", "zero_hpz_partition_size", "device_groups"),
    ),
    "name files, folders or hf:owner/name with --data, parts of them with ?split=": (
        *("dataset", "dataset_name", "dataset_dir", "dataset_config", "dataset_test_split"),
        "max_samples",
    ),
    "--weights and --embeddings say where weights are": (
        *("device_map", "low_cpu_mem_usage", "lora_on_cpu", "experimental_skip_move_to_device"),
        *("max_memory", "offload_folder", "quantization_device_map", "offload_embedding"),
        *("use_kt", "kt_cpu_activation", "kt_config"),
    ),
    "--memory-limit sets how much of the GPU the run takes": ("gpu_memory_limit", "gpu_memory_utilization"),
    "--quantize nf4 and int8 are bitsandbytes' formats, nf4 with nested scales": (
        *("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "use_bnb_nested_quant", "double_quantization"),
        *("bnb_4bit_quant_storage", "bnb_config_kwargs", "bnb_4bit_use_double_quant"),
    ),
    "--quantize stores experts, too": ("quantize_moe_experts",),
    "sampling runs in the training process, on its weights": ("fast_inference", "max_lora_rank", "use_vllm"),
    "MXFP4 experts are read as they are; --expand-experts expands them": (
        *("model_quantization_config", "model_quantization_config_kwargs"),
    ),
    "documents are shuffled anew each epoch, by --seed": (
        *("dataset_shuffle", "shuffle_dataset", "shuffle_merged_datasets", "shuffle_before_merging_datasets"),
        *("data_seed", "shuffle", "shuffle_buffer_size"),
    ),
    "--seq-len bounds prompt and answer together": ("max_prompt_length", "truncation_mode"),
    "--on-spike skip leaves out steps whose loss is a spike": ("loss_watchdog_threshold", "loss_watchdog_patience"),
    "metrics.jsonl is always written; --log-to names trackers, their own variables (WANDB_PROJECT) the rest": (
        *("logging_dir", "plot_loss", "logging_first_step", "use_tensorboard", "wandb_entity", "wandb_watch"),
        *("wandb_run_id", "wandb_log_model", "comet_project_name", "wandb_mode", "trackio_space_id"),
        *("use_comet", "use_swanlab", "use_otel_metrics", "hf_mlflow_log_artifacts"),
    ),
    "--sample-prompt shows answers before and after training": ("eval_table_size", "eval_max_new_tokens"),
    "the tokenizer's own chat template is used, or the Jinja file of --chat-template": (
        *("template", "chat_template", "tokenizer_use_mistral_common", "agent_template", "template_backend"),
    ),
    "Alpaca's prompt is a text here, which tokenizers of torchtune put into the turns of a chat": ("alpaca_dataset",),
    "prompts and answers of these pairs are texts here, which tokenizers of torchtune put into the turns of a chat": (
        "stack_exchange_paired_dataset",
    ),
    "names of data sets are those of ModelScope there, of the Hugging Face hub here": ("modelscope",),
    "the first rows of a data set are read, where as many are drawn there": ("dataset_sample",),
    "embedding tables keep the rows of the model's files": (
        *("resize_token_embeddings_to_32x", "mean_resizing_embeddings", "shrink_embeddings", "resize_vocab"),
    ),
    "config.json names the model's family": (
        *("model_type", "tokenizer_type", "is_llama_derived_model", "is_mistral_derived_model"),
        *("is_qwen_derived_model", "tokenizer_use_fast", "tokenizer_legacy"),
        *("is_falcon_derived_model", "use_fast_tokenizer", "processor_type", "base_model_config"),
    ),
    "evaluations and checkpoints are counted in steps: --eval-every, --save-every": (
        *("eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy", "evals_per_epoch"),
        "saves_per_epoch",
    ),
    "evaluation takes the training's batch size": (
        *("per_device_eval_batch_size", "eval_batch_size", "auto_find_batch_size", "eval_accumulation_steps"),
        *("eval_do_concat_batches", "eval_use_gather_object"),
    ),
    "checkpoints can always be resumed, and results are safetensors": ("save_safetensors", "save_only_model"),
    "taken for --steps, of data that have so many": ("max_steps_per_epoch",),
    "this is what training does": ("do_train", "do_eval", "strict", "average_tokens_across_devices"),
    "jaxglue export --push publishes a result": (
        *("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "push_model", "hub_path", "hub_token"),
        "export_hub_model_id",
    ),
    "training writes the adapter (lora); jaxglue export --adapter DIR --output NEW merges it (merged_16bit), and "
    "jaxglue export --quantize nf4 --base NEW rounds that (merged_4bit)": (
        *("save_method", "save_model", "save_path", "merge_lora", "export_device", "export_legacy_format"),
        *("maximum_memory_usage", "export_quantization_bit"),
    ),
    "jaxglue export --gguf q4_k_m --adapter DIR --output NEW writes a file for llama.cpp and Ollama": (
        *("gguf", "save_gguf", "push_gguf", "quantization", "quantization_method"),
    ),
    "jaxglue export --imatrix DATA calibrates K-quants": ("export_quantization_dataset", "imatrix_file"),
    "jaxglue export --max-shard-bytes limits a file's size": ("export_size", "max_shard_size"),
    "adapters have no biases": ("bias", "lora_bias"),
    "dtypes are bfloat16 and float32: --dtype": (
        *("fp16", "pure_bf16", "upcast_layernorm", "upcast_lmhead_output", "fp32_norms", "cast_lm_head_to_fp32"),
        *("embeddings_skip_upcast", "peft_autocast_adapter_dtype", "autocast_adapter_dtype", "mixed_precision"),
    ),
    "no remote code is ever run": ("trust_remote_code",),
    "answers come from the model in training, by the engine of jaxglue generate": (
        *("use_vllm", "vllm_mode", "vllm_model_impl", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size"),
        *("vllm_max_model_length", "vllm_enable_sleep_mode", "vllm_server_base_url", "vllm_server_host"),
        *("vllm_server_port", "vllm_server_timeout", "vllm_group_port", "vllm_dtype", "vllm_device", "vllm"),
        *("use_transformers_paged", "use_transformers_continuous_batching", "cache_implementation"),
        *("ds3_gather_for_generation", "use_liger_loss", "fast_inference"),
        *("transformers_continuous_batching_config", "infer_backend", "infer_dtype", "vllm_maxlen", "vllm_config"),
        *("vllm_gpu_util", "vllm_enforce_eager", "vllm_max_lora_rank", "vllm_max_model_len", "vllm_max_num_seqs"),
        *("vllm_limit_mm_per_prompt", "vllm_enable_prefix_caching", "vllm_engine_kwargs", "vllm_enable_lora"),
        *("sleep_level", "offload_model", "offload_optimizer", "move_model_batches"),
    ),
    "rollouts.jsonl has all answers, run.html shows them": (
        *("log_completions", "num_completions_to_print", "log_unique_prompts", "wandb_log_unique_prompts"),
        *("log_completions_hub_repo",),
    ),
    "the cache knows what has changed": (
        *("overwrite_cache", "tokenized_path", "load_from_cache_file", "dataset_keep_in_memory"),
    ),
    "the tokenizer's own are used": ("pad_token",),
    "the tokenizer's own are used, whatever the recipe names": ("bos_token", "unk_token"),
    "the console and metrics.jsonl have it": (
        *("log_level", "debug", "include_tokens_per_second", "include_num_input_tokens_seen", "disable_tqdm"),
        *("log_on_each_node", "log_level_replica", "skip_memory_metrics", "log_multimodal", "include_tkps"),
        *("include_effective_tokens_per_second", "print_param_status"),
    ),
    "each program finds this by itself": ("local_rank", "lora_task_type", "lora_fan_in_fan_out"),
    "the first and the last step are always shown, the last always saved": ("save_first_step",),
    "--resume continues the latest checkpoint of --output": (
        *("resume_from_checkpoint", "auto_resume_from_checkpoints"),
        *("ignore_data_skip", "restore_callback_states_from_checkpoint"),
    ),
    "evaluation is the loss on held-out rows, and --sample-prompt's answers": (
        *("prediction_loss_only", "include_for_metrics", "batch_eval_metrics", "eval_on_start", "eval_delay"),
        *("do_predict", "bf16_full_eval", "fp16_full_eval", "compute_accuracy", "eval_on_each_dataset"),
        *("do_causal_lm_eval", "eval_causal_lm_metrics", "do_bench_eval", "bench_dataset", "predict_with_generate"),
        *("generate_samples", "num_generation_samples", "do_sample", "max_new_tokens", "dpo_generate_during_eval"),
    ),
    "--train-vision says what trains of a model that sees: none, its projector, or all": (
        *("freeze_multi_modal_projector", "freeze_aligner", "freeze_llm"),
        *("finetune_language_layers", "finetune_attention_modules", "finetune_mlp_modules", "finetune_audio_layers"),
    ),
    "--image-max-pixels and --image-max-tokens bound images, whose sizes are otherwise those of the model's files": (
        *("image_size", "image_resize_algorithm", "image_min_pixels", "video_min_pixels", "min_pixels"),
        "vision_image_size",
    ),
    "rows name frames, clips and their times, and paths begin at the folder of the data": (
        *("video_fps", "video_maxlen", "audio_sampling_rate", "use_audio_in_video", "media_dir"),
    ),
    "tokens are read from the variable HF_TOKEN": ("hf_hub_token", "ms_hub_token", "om_hub_token", "hf_use_auth_token"),
}
NOTES = {name: reason for reason, names in _REASONS.items() for name in names}
"""Remedies for settings of other programs, by name."""
AS_HERE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("bias", "lora_bias"), ("none",)),
    **{"label_smoothing_factor": (0,), "train_sampling_strategy": ("random",), "f_divergence_type": ("reverse_kl",)},
    **dict.fromkeys(("freeze_multi_modal_projector", "freeze_aligner"), (True,)),
    **{"finetune_language_layers": (True,), "finetune_attention_modules": (True,), "finetune_mlp_modules": (True,)},
    **{"freeze_llm": (False,)},
    **{"mix_strategy": ("concat",), "quantization_type": ("nf4",), "reward_num_workers": (1,), "shuffle": (True,)},
    **dict.fromkeys(("dataset_shuffle", "train_dataloader_shuffle", "shuffle_dataset"), (True,)),
    "shuffle_merged_datasets": (True,),
    "task_type": ("CAUSAL_LM", "causal_lm", "FEATURE_EXTRACTION"),
    "init_weights": (True, "true"),
    "init_lora_weights": (True,),
    "dataset_kwargs": ({"skip_prepare_dataset": True}, {"skip_prepare_dataset": False}),
}
"""Values of settings without a counterpart by which a recipe asks for what is done anyway."""
CHANGES = {
    NOTES[name]
    for name in (
        "template",
        "alpaca_dataset",
        "stack_exchange_paired_dataset",
        "bos_token",
        "modelscope",
        "dataset_sample",
        "dataset",
        "max_prompt_length",
        "dataset_shuffle",
        "max_steps_per_epoch",
        "bias",
        "fp16",
        "freeze_aligner",
        "image_size",
        "media_dir",
        "per_device_eval_batch_size",
    )
}
"""Reasons beside which the result may differ."""
MET = {
    NOTES[name]
    for name in (
        *("packing", "gradient_checkpointing", "attn_implementation", "tf32", "dataset_shuffle", "do_train"),
        *("save_safetensors", "log_level", "local_rank", "per_device_eval_batch_size"),
    )
}
"""Reasons of settings whose wish is met anyway."""
PYTHON = {
    "train_dataset": "data takes files, and rows in memory",
    "processing_class": "tokenizer takes a folder, or a tokenizer of transformers; by default the model's is used",
    "peft_config": "rank, alpha, dropout and targets are settings of their own",
    "args": "each training argument is a setting of its own, by the same name where both have it",
    "formatting_func": "data takes rows, which may be made by any program",
    "data_collator": "documents are packed, and loss_on names the tokens with loss",
    "ref_model": "the reference is the model as training begins",
    "optimizers": "optimizer names one, or takes a transformation of optax",
}
"""Arguments of TRL's trainers in Python."""
REFUSED = {
    **dict.fromkeys(("tokens", "add_tokens", "new_special_tokens"), "--new-tokens reads them from a file, one a line"),
    **dict.fromkeys(("betas", "adam_betas"), "--beta1 and --beta2 are AdamW's"),
    "moe_aux_loss_coeff": "--router-balance-loss weighs the mean of the layers' losses, not their sum",
    **dict.fromkeys(
        ("qat", "quantizer", "qat_scheme", "fake_quant_after_n_steps"),
        "--serve-as nvfp4 (nf4, mxfp4, q4_k_m) trains an adapter for weights that are rounded when served",
    ),
    **dict.fromkeys(
        ("teacher_model", "teacher_checkpointer", "kd_loss", "kd_ratio", "teacher_adapters", "teacher_model_server"),
        "--objective distill with --teacher learns a teacher's distributions, of answers that the model writes, or "
        "with --lmbda 0 --beta 0 of the rows', beside their cross-entropy × --sft-alpha",
    ),
    "model_config": "config.json has the model's settings; --router-balance-loss weighs the balance of experts",
    "lora_target_parameters": "--targets names experts' projections, too",
    "dataset_exact_deduplication": "jaxglue data preview counts duplicates: leave them out of the data",
    **dict.fromkeys(
        (
            *("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules", "use_llama_pro"),
            *("freeze_parameters", "freeze_parameters_ratio", "freeze_parameters_regex"),
            *("trainable_parameters", "trainable_parameters_regex"),
        ),
        "weights are trained as adapters or all of them, but those of a vision tower (--train-vision): --layers adapts "
        "some layers, --modules-to-save trains embed_tokens and lm_head whole",
    ),
    **dict.fromkeys(("oft_rank", "oft_block_size", "oft_target"), "adapters are low-rank: --method lora"),
    **dict.fromkeys(
        (
            *("use_galore", "use_apollo", "use_badam", "relora", "lisa_n_layers", "lisa_activated_layers"),
            *("use_adam_mini", "mixture_of_depths", "use_onebitllms", "llmcompressor"),
        ),
        "train adapters (--method lora, with --dora or --rslora) or all weights, by one of --optimizer",
    ),
    **dict.fromkeys(
        ("pissa_init", "init_weights", "init_lora_weights", "loftq_config", "peft"),
        "adapters begin at zero, as PEFT's do by default",
    ),
    **dict.fromkeys(
        ("use_asft_loss", "use_eaft_loss", "use_eaft", "ebft", "diffusion"),
        "--objective names the losses that there are",
    ),
    "external_plugins": "name functions of Python's as they are here: --reward file.py:function, --environment",
    **dict.fromkeys(
        ("cached_dataset", "cached_val_dataset"), "name the data with --data: their tokens are kept in --cache-dir"
    ),
    **dict.fromkeys(
        ("rope_scaling", "overrides_of_model_config"), "the model's config.json has it: copy the folder and edit it"
    ),
    "chat_template_kwargs": "write these values into a template, and name it with --chat-template",
    "sync_ref_model": "the reference is the model as training begins",
    "compute_environment": "accelerate's settings: --mesh says how GPUs share the work",
}
"""The same of settings without which a run would be another."""
HARMLESS = (
    *("wandb_", "mlflow_", "comet_", "swanlab_", "trackio_", "otel_", "tensorboard_", "logging_", "hub_", "push_"),
    *("ddp_", "fsdp_", "deepspeed_", "ray_", "dataloader_", "profiler_", "save_", "vllm_server_", "sglang_"),
    *("ktransformers_", "gradio_", "bench_"),
)
"""Beginnings of names that say where a run is shown, saved or placed, and not what it computes."""
