# SPDX-License-Identifier: Apache-2.0
"""Names that scripts import from upstream and that this engine has nothing behind.

Scripts and libraries import far more than they use, so each name below can be imported, subclassed, subclassed from and
named in annotations; a call of it raises ``NotImplementedError`` with its name. Exceptions are real ones that are never
raised, so that ``except`` clauses work.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

_TABLE = """
vllm.config: AttentionConfig CompilationMode DeviceConfig ECTransferConfig EPLBConfig KVEventsConfig KVTransferConfig
    LoadConfig LoRAConfig MultiModalConfig ObservabilityConfig PassConfig PoolerConfig SpeculativeConfig
    StructuredOutputsConfig get_current_vllm_config set_current_vllm_config get_layers_from_vllm_config
vllm.config.lora: LoRAConfig MaxLoRARanks
vllm.config.load: LoadConfig
vllm.config.pooler: PoolerConfig
vllm.config.weight_transfer: WeightTransferConfig
vllm.distributed: get_pp_group
vllm.distributed.parallel_state: get_pp_group get_pcp_group get_dcp_group graph_capture init_model_parallel_group
    init_world_group patch_tensor_parallel_group prepare_communication_buffer_for_model
vllm.distributed.utils: StatelessProcessGroup stateless_init_torch_distributed_process_group
vllm.distributed.device_communicators.pynccl: PyNcclCommunicator
vllm.distributed.device_communicators.cuda_wrapper: CudaRTLibrary
vllm.distributed.weight_transfer: WeightTransferEngineFactory
vllm.distributed.weight_transfer.base: WeightTransferEngine WeightTransferInitInfo WeightTransferInitRequest
    WeightTransferUpdateInfo WeightTransferUpdateRequest
vllm.distributed.weight_transfer.nccl_common: trainer_init
vllm.distributed.weight_transfer.nccl_engine: NCCLTrainerSendWeightsArgs NCCLWeightTransferEngine
    NCCLWeightTransferInitInfo NCCLWeightTransferUpdateInfo
vllm.distributed.weight_transfer.packed_tensor: packed_nccl_broadcast_producer
vllm.engine.arg_utils: nullable_str
vllm.engine.protocol: StreamingInput
vllm.entrypoints.api_server: build_app init_app run_server
vllm.entrypoints.chat_utils: ChatCompletionMessageParam ConversationMessage apply_hf_chat_template parse_chat_messages
    parse_chat_messages_async resolve_hf_chat_template
vllm.entrypoints.cli.serve: ServeSubcommand run_headless
vllm.entrypoints.launcher: serve_http
vllm.entrypoints.launchers.cli_args: FrontendArgs
vllm.entrypoints.logger: RequestLogger
vllm.entrypoints.openai.api_server: build_async_engine_client init_app_state run_server setup_server
vllm.entrypoints.openai.cli_args: make_arg_parser validate_parsed_serve_args
vllm.entrypoints.openai.chat_completion.protocol: ChatCompletionRequest ChatCompletionResponse
    ChatCompletionStreamResponse
vllm.entrypoints.openai.chat_completion.serving: OpenAIServingChat
vllm.entrypoints.openai.completion.protocol: CompletionRequest CompletionResponse CompletionStreamResponse
vllm.entrypoints.openai.completion.serving: OpenAIServingCompletion
vllm.entrypoints.openai.models.protocol: BaseModelPath LoRAModulePath
vllm.entrypoints.openai.models.serving: OpenAIServingModels
vllm.entrypoints.openai.parser.harmony_utils: get_encoding
vllm.entrypoints.openai.protocol: ChatCompletionResponse CompletionResponse ErrorResponse
vllm.entrypoints.openai.serving_chat: OpenAIServingChat
vllm.entrypoints.openai.serving_completion: OpenAIServingCompletion
vllm.entrypoints.openai.serving_models: BaseModelPath LoRAModulePath OpenAIServingModels
vllm.entrypoints.openai.tool_parsers: ToolParser ToolParserManager
vllm.entrypoints.pooling.embed.protocol: EmbeddingChatRequest EmbeddingCompletionRequest EmbeddingResponse
vllm.entrypoints.pooling.embed.serving: ServingEmbedding
vllm.entrypoints.pooling.scoring.protocol: ScoreResponse ScoreTextRequest
vllm.entrypoints.pooling.scoring.serving: ServingScores
vllm.entrypoints.serve.engine.protocol: ErrorInfo ErrorResponse
vllm.entrypoints.serve.lora.protocol: LoadLoRAAdapterRequest
vllm.entrypoints.serve.tokenize.protocol: DetokenizeRequest DetokenizeResponse TokenizeChatRequest
    TokenizeCompletionRequest TokenizeResponse
vllm.entrypoints.serve.tokenize.serving: ServingTokenization
vllm.entrypoints.speech_to_text.transcription.protocol: TranscriptionRequest TranscriptionResponse
    TranscriptionStreamResponse
vllm.entrypoints.speech_to_text.transcription.serving: OpenAIServingTranscription
vllm.entrypoints.utils: cli_env_setup with_cancellation
vllm.exceptions: VLLMClientError VLLMValidationError
vllm.inputs: EmbedsPrompt ExplicitEncoderDecoderPrompt MultiModalDataDict SingletonPrompt
vllm.inputs.data: EmbedsPrompt ExplicitEncoderDecoderPrompt SingletonPrompt
vllm.inputs.llm: MultiModalDataDict
vllm.logits_process: LogitsProcessor
vllm.lora.layers.base: BaseLayerWithLoRA
vllm.lora.lora_model: LoRAModel
vllm.lora.model_manager: LoRAModelManager
vllm.lora.peft_helper: PEFTHelper
vllm.lora.utils: get_adapter_absolute_path
vllm.lora.worker_manager: LRUCacheWorkerLoRAManager WorkerLoRAManager
vllm.model_executor: SamplingMetadata
vllm.model_executor.layers.fused_moe: MoERunner RoutedExperts UnquantizedFusedMoEMethod fused_experts
vllm.model_executor.layers.logits_processor: LogitsProcessor
vllm.model_executor.layers.pooler: Pooler
vllm.model_executor.model_loader.utils: process_weights_after_loading set_default_torch_dtype
vllm.model_executor.model_loader.reload: finalize_layerwise_reload initialize_layerwise_reload
vllm.model_executor.model_loader.weight_utils: default_weight_loader
vllm.model_executor.models.interfaces: SupportsLoRA SupportsMultiModal SupportsPP
vllm.model_executor.models.utils: AutoWeightsLoader WeightsMapper
vllm.model_executor.parameter: BasevLLMParameter BlockQuantScaleParameter ModelWeightParameter
vllm.model_executor.sampling_metadata: SamplingMetadata
vllm.model_executor.utils: replace_parameter
vllm.multimodal: MULTIMODAL_REGISTRY MultiModalDataDict
vllm.multimodal.utils: fetch_image fetch_video
vllm.outputs: ClassificationOutput ClassificationRequestOutput EmbeddingOutput EmbeddingRequestOutput PoolingOutput
    PoolingRequestOutput ScoringOutput ScoringRequestOutput
vllm.plugins: load_general_plugins
vllm.pooling_params: PoolingParams
vllm.reasoning: ReasoningParser ReasoningParserManager
vllm.renderers: renderer_from_config
vllm.renderers.base: BaseRenderer
vllm.renderers.inputs.preprocess: extract_prompt_components
vllm.renderers.online_renderer: OnlineRenderer
vllm.sampling_params: GuidedDecodingParams
vllm.sequence: IntermediateTensors SequenceGroup SequenceStatus
vllm.tool_parsers: ToolParser ToolParserManager
vllm.utils.async_utils: make_async merge_async_iterators
vllm.v1.engine.core: EngineCoreProc
vllm.v1.engine.core_client: EngineCoreClient SyncMPClient AsyncMPClient
vllm.v1.engine.utils: CoreEngineProcManager
vllm.v1.metrics.loggers: LoggingStatLogger PrometheusStatLogger StatLoggerBase
vllm.v1.metrics.ray_wrappers: RayPrometheusStatLogger
vllm.v1.sample.logits_processor: AdapterLogitsProcessor BatchUpdate LogitsProcessor MoveDirectionality
vllm.v1.worker.worker_base: WorkerBase WorkerWrapperBase
vllm.worker.worker_base: WorkerWrapperBase
"""


def _parse(table: str) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for line in table.strip().splitlines():
        if not line.startswith(" "):
            module, _, line = line.partition(":")
        names.setdefault(module, []).extend(line.split())
    return names


NAMES = _parse(_TABLE)
_PACKAGES = {module.rsplit(".", depth)[0] for module in NAMES for depth in range(module.count("."))}
_REMEDIES = {
    "StructuredOutputsConfig": "outputs are held to grammars by llguidance, there is nothing to set; leave it out",
    "Guided": "use SamplingParams(structured_outputs=StructuredOutputsParams(...))",
    "LoRA": "merge the adapter into the checkpoint",
    "Pool": "only text generation is supported",
}


def _refusal(name: str) -> NotImplementedError:
    remedy = next((text for word, text in _REMEDIES.items() if word in name), "it can be imported, not used")
    return NotImplementedError(f"{name} is upstream's and not supported by this engine: {remedy}")


def refuse(name: str) -> Callable[..., Any]:
    """A function called ``name`` that raises ``NotImplementedError``."""

    def absent(*_args: Any, **_kwargs: Any) -> Any:
        raise _refusal(name)

    absent.__name__ = absent.__qualname__ = name.rpartition(".")[2]
    absent.__module__ = name.rpartition(".")[0]
    return absent


class _AbsentMeta(abc.ABCMeta):
    def __getattr__(cls, name: str) -> Any:
        # Private names are probed by pickle, torch, pydantic and others, which expect the usual answer.
        if name.startswith("_"):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        return refuse(f"{cls.__module__}.{cls.__qualname__}.{name}")


class Absent(metaclass=_AbsentMeta):
    """Base of the classes that can be imported but not instantiated."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
        base = next(c for c in cls.__mro__ if c.__dict__.get("_absent"))
        raise _refusal(f"{base.__module__}.{base.__qualname__}")

    def __class_getitem__(cls, _item: Any) -> Any:
        return cls


def _make(module: str, name: str) -> Any:
    if name.endswith("Error"):
        return type(name, (Exception,), {"__module__": module, "__doc__": "Upstream's; never raised here."})
    if name[0].isupper():
        return _AbsentMeta(
            name, (Absent,), {"__module__": module, "__doc__": "Upstream's; see above.", "_absent": True}
        )
    return refuse(f"{module}.{name}")


def add_names(module: ModuleType) -> None:
    """Give ``module`` those of its names in the table that it has not itself."""
    for name in NAMES.get(module.__name__, ()):
        if not hasattr(module, name):
            setattr(module, name, _make(module.__name__, name))


class _SourceLoader(SourceFileLoader):
    """A module of this package that lacks some of the names."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        add_names(module)


class _EmptyLoader(Loader):
    """A module that this package does not have."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        add_names(module)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in _PACKAGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            return ModuleSpec(fullname, _EmptyLoader(), is_package=True)
        if fullname in NAMES and type(spec.loader) is SourceFileLoader:
            spec.loader = _SourceLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Make the names importable; once is enough."""
    if not any(type(finder) is _Finder for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
