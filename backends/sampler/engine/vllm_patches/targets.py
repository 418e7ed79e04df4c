"""The internals of vLLM 0.32 that are changed or relied on; `doctor` reads this list, and it imports no vLLM."""

from tinker_server.backends.families.linear_attention import GATED_NORMS as GATED_NORMS
from tinker_server.backends.families.registry import ENGINE_PATCHES
from tinker_server.backends.patches import Patch

EXECUTOR = "tinker_server.backends.sampler.engine.vllm_patches.executor.Executor"
"""The executor of an engine with several ranks."""

ENGINE_CONTEXT = Patch(
    "forked-engine",
    "vllm.v1.engine.utils:get_mp_context",
    "b377dc6ca3e3f961803bd9492cd9a64e2ada3f2909a36f612528dd47f006822a",
    "A new interpreter imports for 10 s what a fork has; vLLM's own forks come after the first OpenMP threads.",
)
MODEL_INSPECTION = Patch(
    "model-inspection",
    "vllm.model_executor.models.registry:_run_in_subprocess",
    "80408fcf7d4998306020d489f2e623d094ed7cf152965a1b2df17497e79e1411",
    "Another interpreter imports vLLM, for 9 s and more, to look at a class: processes here have its libraries.",
)
KV_CACHE_ZEROING = Patch(
    "kv-cache-zeroing",
    "vllm.v1.kv_cache_interface:KVCacheConfig.needs_kv_cache_zeroing",
    "7190a57e7cf4dcb8a9a27fdb987888e6d7b2ab2b60787131891f1f21094495b9",
    "Attention multiplies the old contents of a reused KV cache block by zero; a diverged adapter's NaN stays NaN.",
    "kv-cache-zeroing.md",
)
ADAPTER_FILES = Patch(
    "stacked-adapters",
    "vllm.lora.lora_model:safetensors",
    "e6439628e5e71c94a087da2a91964f9e2313616b8550c7cc56cfc92b17effaaa",
    "Adapters written layer-stacked are read under the names of their single tensors.",
)
PIN_FILES = Patch(
    "pinned-adapter-files",
    "vllm.lora.lora_model:PIN_MEMORY",
    "4e6707fb1381f47e74119621e9014055871ab61010abde9e213eca3529d84b99",
    "Pinning each of a new adapter's 500 tensors takes 0.2 s on an H100, and saves 0.02 s of each copy.",
    "pinned-adapters.md",
)
PIN_MERGED = Patch(
    "pinned-merged-adapters",
    "vllm.lora.model_manager:PIN_MEMORY",
    "508b6ef93016abd799a52209d95bc624432782aeef30cf0b999b368a87b0348e",
    "As pinned-adapter-files, after query, key and value have been merged.",
    "pinned-adapters.md",
)
WORKER_ADAPTERS = Patch(
    "worker-adapters",
    "vllm.v1.worker.lora_model_runner_mixin:LRUCacheWorkerLoRAManager",
    "dda66aaf8567e419fe8d66d17c77723727433ece8c22511f747670231bb7645e",
    "Our subclass notes an adapter's files, with which its slot is compared.",
)
LOAD_ADAPTER = Patch(
    "adapter-files-noted",
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter",
    "0b052a4493e20f18191889f06ea416a0258975e0082e1dd3f6266b2f1ca63cc5",
    "Called with each adapter whose files are read; reads them into vLLM's own form.",
    how="overridden",
)
SLOTS = Patch(
    "slot-check",
    "vllm.lora.model_manager:LRUCacheLoRAModelManager.activate_adapter",
    "294b47faa30f9aed4a58c7281e4886f1b66f59b7d28645f9145a2bfb0fe5d52f",
    "A slot that holds other values than the adapter's files gives wrong numbers without an error.",
    how="overridden",
)
FILL_SLOT = Patch(
    "slot-filling",
    "vllm.lora.model_manager:LoRAModelManager.activate_adapter",
    "ff6e9539601488dbd20b2ab256e97caca2d6afc9f0265d7f4d70726a06d89731",
    "Fills a slot; `lora_index_to_id` says which one.",
    how="relied on",
)
MERGED_EXPERTS = Patch(
    "expert-stacks",
    "vllm.lora.model_manager:LoRAModelManager._create_merged_loras_inplace",
    "308cf29339985c536a5bcc5e05afc60af9ae1f464f8a0ca7bd99a309f74483e9",
    "Stacked experts are taken only where all experts share one adapter; 48 layers of single ones are 37,000 tensors.",
    how="overridden",
)
SHARED_EXPERTS = Patch(
    "shared-expert-slots",
    "vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin:LoRAExpertsMixin",
    "c0a03bdb7ef547a6fac3f6a129e799046b40c5ac56b724b24b7c425ebcd67eb5",
    "Factors that a layer's experts share are in a slot once, and reach the kernels as views for every expert.",
    how="relied on",
)
WRAPPED_MODULES = Patch(
    "tower-qkv",
    "vllm.lora.model_manager:LoRAModelManager._create_lora_modules",
    "dd58ad0021fd542526e7c72bf32a5b050a1beca1ff891f296d7a5ab19f4615d7",
    "Some vision towers' merged query, key and value are not declared: with LoRA there the engine refuses to start.",
    "tower-qkv.md",
    how="overridden",
)
PIECES_OF_RANKS = Patch(
    "one-part-linears",
    "vllm.lora.layers.column_parallel_linear:ColumnParallelLinearWithLoRA.slice_lora_b",
    "623e4320ea6d834b2f9631d37098104797930c63629708ca6349fe1ca7318c2b",
    "Of a merged linear with one part (in some linear attention) a rank gets two pieces of B, as if it had two parts.",
    "one-part-linears.md",
    how="relied on",
)
SLICED_LINEARS = Patch(
    "linears-by-heads",
    "vllm.lora.layers.column_parallel_linear:MergedColumnParallelLinearWithLoRA",
    "f7a0d743ccb6bc69ffedb0c113a6bab4b44dacab1bc0663b50dc1bda7808363e",
    "A linear whose rows go by heads, in some linear attention, has one slice, where the service has four adapters.",
    how="overridden",
)
HEAD_BESIDE_DECODER = Patch(
    "head-beside-decoder",
    "vllm.lora.model_manager:LoRAModelManager._get_punica_wrapper",
    "d45edd555aadd264ef787cf1b855c30e97348ddc40d3ae5de97fbab61af31778",
    "A head that stands beside a multimodal model's decoder, not in it, gets no LoRA.",
    "head-beside-decoder.md",
    how="overridden",
)
SUPPORTED_MODULES = Patch(
    "lm-head-files",
    "vllm.lora.model_manager:LoRAModelManager.__init__",
    "cead7d6a7b99eb85551d2a0d4291d11bca0f6fad961e33c42553de6b2d1869a4",
    "Of some models (Mistral, Gemma) the head is wrapped, and files that have an adapter for it are refused.",
    "lm-head-files.md",
    how="overridden",
)
PUNICA = Patch(
    "lora-kernels",
    "vllm.lora.model_manager:get_punica_wrapper",
    "68e4e5aed917b540eadd9b31b8cfdc70b8dcac53da05d80c61ce83c428b18f23",
    "Prompt log probabilities with LoRA on the head look up the slot by sampled row, where each row is a prompt token.",
    "prompt-logprobs-with-lora.md",
)
PUNICA_CPU = Patch(
    "lora-kernels-cpu",
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU",
    "0a615fa319a8cf2889bc2babccb96ddd77b5dc431c5d8b6ded98b3bf9bfccc27",
    "A row without an adapter has slot -1, by which torch indexes the last slot.",
    "cpu-slot-minus-one.md",
    how="overridden",
    device="cpu",
)
PUNICA_GPU = Patch(
    "lora-kernels-cuda",
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.add_lora_logits",
    "42bc7ef46b11053e42a3fe6c58e366fdf4369bed9ac51220ae786867034422e8",
    "As lora-kernels.",
    "prompt-logprobs-with-lora.md",
    how="overridden",
    device="cuda",
)
SHARED_FACTORS = Patch(
    "shared-factors",
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.add_lora_fused_moe",
    "d907ceb69cec52aa9bb403e1e0ff0147bfea1ba25d3d81339fd93ec37842b347",
    "A token is multiplied by a factor that experts share once for each expert, which takes half of an adapter's time.",
    how="overridden",
    device="cuda",
)
SHRINK_TILES = Patch(
    "lora-shrink-tiles",
    "vllm.lora.ops.triton_ops.lora_shrink_op:get_lora_op_configs",
    "5df20ca2a1fa438a916ebc69ffa69a2ae9ef73b0c75f1fceb383990cd57403a5",
    "With the sizes here, adapters take about half of their time in a decode step.",
    device="cuda",
)
EXPAND_TILES = Patch(
    "lora-expand-tiles",
    "vllm.lora.ops.triton_ops.lora_expand_op:get_lora_op_configs",
    "f1dee6581c49a4160616593de7e9db431816ac8a757597e928112d4c08ab4a1f",
    "As lora-shrink-tiles.",
    device="cuda",
)
GRAMMARS = Patch(
    "grammar-time",
    "vllm.v1.structured_output.backend_xgrammar:XgrammarGrammar",
    "2fd1f8c044499423469c14b5ee1a42392afef7825efb9991729cf7e41dd46fbc",
    "A grammar's allowed tokens are computed between the steps that all sequences share: the time is bounded.",
)
GRAMMAR_OWNERS = Patch(
    "grammar-owners",
    "vllm.v1.structured_output:StructuredOutputManager._create_grammar",
    "81f33f6209922e1f7ee4b71238a069567c38c94dee5a73b8872a1b394b1de8f9",
    "The time that grammars take is bounded for each owner, whatever the number of sequences.",
)
GRAMMAR_CHECKS = Patch(
    "grammar-checks",
    "vllm.v1.structured_output.backend_xgrammar:validate_xgrammar_grammar",
    "659d831616dce502857a2844427d3d2ad0325bbf4de420e19c52a5c8b8eda031",
    "The check of a slow grammar takes 0.06 s, in which nothing else is served, for each sequence of a chat.",
)
COUNT_BATCH = Patch(
    "batch-count",
    "vllm.v1.engine.core:EngineCore.count_batch",
    (),
    "Sequences and cache use on demand; vLLM's own statistics cost something for each sequence in each step.",
    how="added",
)
RMS_NORM = Patch(
    "float32-residual",
    "vllm.model_executor.layers.layernorm:RMSNorm",
    "fd68286f95f7fbccc1ecad7e53d72647510092226854882474b7a59e6cdb2066",
    "The residual stream stays in float32, as the trainer's; through vLLM's register of out-of-tree operators.",
    how="overridden",
)
GEMMA_NORM = Patch(
    "float32-residual-gemma",
    "vllm.model_executor.layers.layernorm:GemmaRMSNorm",
    "5326e8c828815e7d47962cd0e008453197727de06b41b8f8b73e0abc01ebffa7",
    "As float32-residual.",
    how="overridden",
)
CHAT_PROMPTS = Patch(
    "chat-prompts",
    "vllm.renderers.base:BaseRenderer._process_tokens_async",
    "4b8af29a931c9fe9af2f59fb593f6a5020d23253163b012764b55b7f34af5b45",
    "Images of chats pass through the trainer's own renderer.",
)
CPU_EXPERTS = Patch(
    "cpu-experts",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:select_unquantized_moe_backend",
    "c76e6211b9c0ee812e4f616a4892cb6d41506762daa840f93d342a922f58aac3",
    "With LoRA enabled a mixture's experts take the Triton kernel, whatever the device; no CPU has Triton.",
    "cpu-experts-with-lora.md",
    device="cpu",
)
CPU_UNGATED_EXPERTS = Patch(
    "cpu-ungated-experts",
    "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig.__post_init__",
    "d6646dd67e4468e3753924e4b3fa649424130c3c74a796d6d09c6e500e83125f",
    "Experts without a gate are refused on a CPU, at the end of the check; ours there compute them.",
    device="cpu",
)
CPU_CONVOLUTION = Patch(
    "cpu-one-token-prefill",
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_causal_conv1d_fwd_cpu",
    "edbe0cbe6c57aa951250f3652c1797f89cb31badb0f2b7ca4315b6615f0c82ee",
    "A one-token prefill of a linear-attention model ends the engine.",
    "cpu-one-token-prefill.md",
    device="cpu",
)
CPU_MAMBA2 = Patch(
    "cpu-mamba2-prompts",
    "vllm.model_executor.layers.mamba.mamba_mixer2:MambaMixer2.get_kv_cache_spec",
    "2f9c55af7d14e0e77f6cc8317bfeb8cfe964c928f22d581a7530b7016855f6f7",
    "With prefix caching a prompt's state is wanted at the end of a block too, which no CPU kernel gives.",
    "cpu-mamba2-checkpoints.md",
    device="cpu",
)
CPU_IMAGES = Patch(
    "cpu-whole-images",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build",
    "2f510081c4302294c3e9e5bef66ba9e11fe7250785084481a04e455ca62876c0",
    "Tokens of an image that should see each other (Gemma 3) see only those before them.",
    "cpu-whole-images.md",
    device="cpu",
)
CPU_ATTENTION = Patch(
    "cpu-whole-images-attention",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
    "ffd116ede55f22f5874649ff6b222387d42392524f4db84a0d1e6def0bf6542d",
    "As cpu-whole-images.",
    "cpu-whole-images.md",
    device="cpu",
)
SCHEDULED_IMAGES = Patch(
    "images-in-one-step",
    "vllm.v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs",
    "746742895fa699584a484dbaec4cff99413d501e5bbf27b70a0b6ac6c76412fc",
    "An image at the beginning of a step, or behind a cached prefix that ends in it, may be cut where the step ends.",
    "images-in-one-step.md",
)
CPU_ROUTING = Patch(
    "cpu-routed-experts",
    "vllm.config.vllm:VllmConfig._verify_aux_output_compatibility",
    "6dddfaef7aa2d9c594dced9a7fb031a6710c454011b5d04c0268918b3e3203c3",
    "Routed experts are refused for the V1 model runner, which gets vLLM's own connector here.",
    device="cpu",
)
V1_PROMPT_LOGPROBS = Patch(
    "prompt-scores-v1",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict",
    "f2e2ad4c2b6202a6a50d62f193de300f850fb18127c1e035eca8282120477318",
    "Log probabilities of chosen tokens, and draws, at every prompt position.",
    device="cpu",
)
V1_GREEDY = Patch(
    "placeholders-v1-greedy",
    "vllm.v1.sample.sampler:Sampler.greedy_sample",
    "3471018c24bb6d4a6bd1a3c060822c69012da177844830cf4b12fdee8e935d5f",
    "Placeholder tokens of images are hidden from the draw alone, not from log probabilities.",
    device="cpu",
)
V1_RANDOM = Patch(
    "placeholders-v1-random",
    "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler",
    "626cbf5a10357aa983a27b1b543e2b93155011a2fedcbfb5579bbf181720484f",
    "As placeholders-v1-greedy.",
    device="cpu",
)
V2_GUMBEL = Patch(
    "draws-v2",
    "vllm.v1.worker.gpu.sample.sampler:gumbel_sample",
    "4bd7b5c3da2c417f7ffd6516ed596b18b4567b49f343cec6e6bea0c604b2e2c5",
    "As placeholders-v1-greedy; and of scores that are NaN it draws beyond the vocabulary, which ends the engine.",
    "nan-draws.md",
    device="cuda",
)
V2_PROMPT_LOGPROBS = Patch(
    "prompt-scores-v2",
    "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker",
    "218c4268428eaa41b6885b69d219247ee80be7c967f26b9addd6bbd957755483",
    "As prompt-scores-v1.",
    how="overridden",
    device="cuda",
)
V2_CHUNK = Patch(
    "prompt-logprobs-chunk",
    "vllm.v1.worker.gpu.sample.prompt_logprob:CHUNK_SIZE",
    "3cb16bb7b784951812938d1f860990cc1241dd19155ed7aed2bfb15bb38818e2",
    "Logits of a chunk of 1,024 prompt tokens are more than the profiling run takes, so that memory runs out.",
    "prompt-logprobs-memory.md",
    device="cuda",
)
V2_GRAPHS = Patch(
    "prefill-graphs",
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",
    "6d274dc3a02f37d943621da491f2a6bb7c08a8c54a4d651929f290a239c922d1",
    "CUDA graphs for steps with a prompt beside those that only decode, without torch.compile.",
    device="cuda",
)
V2_DISPATCH = Patch(
    "images-without-graphs",
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.dispatch",
    "5641324adf7037f1312c61c0d2c403944d62aa23e100c5981f43efd62464abdb",
    "A captured graph would leak one prompt's image features into the next.",
    "image-features-in-graphs.md",
    device="cuda",
)
FLASH_SCHEDULE = Patch(
    "attention-schedules",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder._get_scheduler_metadata",
    "348aca9bf9ccc931d5ae70832f0d309f4b767e0b480e00e0e469b79f56f8666f",
    "In a graph for any step, attention misreads the schedule of a step of single tokens: wrong numbers for all in it.",
    "attention-schedules.md",
    device="cuda",
)
CPU_WEIGHTS = Patch(
    "cpu-shared-linears",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    "d0cc00dbd80cb25dcf8385e51b806e69c58a93ac4269734ed7e99fc7a6edf1d2",
    "A linear's weights are packed anew for the CPU and removed; those that others map stay as they are.",
    device="cpu",
)
CPU_MAPPING = Patch(
    "cpu-shared-weights",
    "vllm.model_executor.model_loader.weight_cache.ipc_loader:check_ipc_platform_support",
    "372aeb0627057333b2eda590c9d6ba83ab54dd8a6898dacd8116c9f55fa6061b",
    "Weights of another process are mapped on CUDA alone; ours are in shared memory on the CPU.",
    device="cpu",
)
CPU_MAPPED_DEVICE = Patch(
    "cpu-shared-weights-device",
    "vllm.model_executor.model_loader.weight_cache.ipc_loader:get_current_device_uuid",
    "c5f0400ecd9acc3a7b5a53fc865d7556113c480f04dea8f2acc96bbd69ed536d",
    "As cpu-shared-weights: the CPU has no number.",
    device="cpu",
)
WEIGHT_HOLDER = Patch(
    "weight-holder",
    "vllm.model_executor.model_loader.weight_cache.daemon:WeightCacheDaemon",
    "0ceb619ed4febb129db19e5842cf07f32d7f99759ac140cdb08d63d1f8d9a779",
    "Our subclass also tells a trainer where each tensor of the files is, and shares memory on the CPU.",
    how="overridden",
)
MAPPED_MODEL = Patch(
    "mapped-model",
    "vllm.model_executor.model_loader.weight_cache.ipc_loader:initialize_model",
    "19eee78015113ccf0043990767bce027ec5007caf67c41b12ba750d620830cbc",
    "A model whose weights are mapped keeps its other tensors on the meta device, and may fail at its first token.",
)
MAPPED_ENTRIES = Patch(
    "mapped-parameters",
    "vllm.model_executor.model_loader.weight_cache.ipc_loader:IpcModelLoader._apply_entries",
    "e682841e0190550e180e39fc43231b512d59f198cb3f922f19cbf4f625e2bea6",
    "The router of a mixture keeps the parameter that it was made with, without values, in place of the mapped one.",
)
MAPPED_LOADING = Patch(
    "mapped-loading",
    "vllm.model_executor.model_loader.weight_cache.ipc_loader:IpcModelLoader",
    "4d0eb8edcb8dcdce019f9307525b87d16fbcea98b5f4f65c6eeeee86aa12d94e",
    "Maps what the holder gives, and processes nothing again.",
    how="relied on",
)
ANSWERS_OF_RANKS = Patch(
    "answers-of-ranks",
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc",
    "1b819a63eae189b562285d629a3500d4bf2978c48b06494edcd3d19bc4316b2a",
    "Where the first of several ranks fails, the others' answers are taken for those to the next call.",
    "answers-of-ranks.md",
    how="overridden",
)
WIDE_HEAD = Patch(
    "wide-head",
    "vllm.lora.layers.logits_processor:LogitsProcessorWithLoRA.create_lora_weights",
    "02e37a9dea923d4fab22f1033321164acade21e92827bebf245e01d73c53097b",
    "Adapters for heads of more than 258,048 tokens (Gemma 3) are refused, for kernels that vLLM has no longer.",
)
READ_WEIGHTS = Patch(
    "read-weights",
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights",
    "cf78b90b2f9071167b7294b1235b3583d52ecb5f4c51c099a36097dc6f5f3980",
    "Tensors in fp8 are dequantised as they are read: their scales, and products of rounded activations, are not ours.",
)
TOOL_CALL_ENDS = Patch(
    "tool-call-ends",
    "vllm.tool_parsers.hermes_tool_parser:Hermes2ProToolParser._extract_tool_call_jsons",
    "28f414a41d92760a4c7137c1341faaced99c750313e1858af7d2f96fc1c8d1de",
    "An end tag within a string of a call's arguments ends the call there, so that its arguments are no JSON.",
)
PACKED_EXPERTS = Patch(
    "packed-experts",
    "vllm.model_executor.layers.fused_moe.experts.triton_moe:TritonExperts.apply",
    "283b2cdb5a53751be41095782a8dfae4ab1569869fbe0fc174af66df12a0a92e",
    "Experts that stay in fp8 have the trainer's numbers: vLLM's own in fp8 round what they multiply by, too.",
    how="overridden",
)
PACKED_EXPERTS_WEIGHTS = Patch(
    "packed-experts-weights",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
    "0d06ae5d1ed6d8ac6641a5b92262a0ca3b5795e0d943210c8096c88f777dece9",
    "As packed-experts: a layer's experts are bytes.",
    how="overridden",
)
EXPERT_TILES = Patch(
    "expert-tiles",
    "vllm.model_executor.layers.fused_moe.moe_align_block_size:moe_align_block_size",
    "a9b9694d32b426219e61d45d51c940d9b010e5b6ec9ff6af87176fca50e955e2",
    "Sorts (token, expert) pairs for our kernel: pairs that are none are numbered beyond all others.",
    how="relied on",
)
PATCHES = [*(patch for patch in vars().values() if isinstance(patch, Patch)), *ENGINE_PATCHES]
