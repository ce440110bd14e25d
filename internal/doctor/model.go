package doctor

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/llmbox-dev/llmbox/internal/finding"
	"github.com/llmbox-dev/llmbox/internal/gpu"
	"github.com/llmbox-dev/llmbox/internal/snapshot"
)

// set changes one key of the box's configuration and installs again.
func set(keys ...string) string {
	return "sudo llmbox install --set " + strings.Join(keys, " --set ")
}

// vllmArg gives vLLM one more argument.
func vllmArg(argument string) string { return set("model.extraArgs=" + argument) }

var (
	kvEstimate   = regexp.MustCompile(`max(?:imum)? (?:seq|model|sequence) len(?:gth)? \((\d+)\)[^\n]*?([\d.]+) GiB KV cache is needed[^\n]*?available KV cache memory \(([\d.]+) GiB\)[^\n]*?estimated maximum model length is (\d+)`)
	kvEstimate2  = regexp.MustCompile(`estimated maximum model length is (\d+)`)
	kvV0         = regexp.MustCompile(`max seq len \((\d+)\) is larger than the maximum number of tokens that can be stored in (?:the )?KV cache \((\d+)\)`)
	kvNone       = regexp.MustCompile(`No available memory for the cache blocks`)
	kvNeeded     = regexp.MustCompile(`\(?([\d.]+) GiB KV cache is needed[^\n]*?available KV cache memory \(([\d.]+) GiB\)`)
	freeMemory   = regexp.MustCompile(`Free memory on device(?: \S+)? \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired GPU memory utilization \(([\d.]+), ([\d.]+) GiB\)`)
	memoryBefore = regexp.MustCompile(`(?:Error in memory profiling|memory profiling)[^\n]*?[Ii]nitial (?:used|free) (?:GPU )?memory:? ?([\d.]+)[^\n]*`)
	oomWarm      = regexp.MustCompile(`CUDA out of memory occurred when warming up sampler with (\d+) dummy requests`)
	oomTorch     = regexp.MustCompile(`CUDA out of memory\. Tried to allocate ([\d.]+ [GM]iB)\. GPU \d+ has a total capaci?ty of ([\d.]+ GiB) of which ([\d.]+ [GM]iB) is free`)
	bf16         = regexp.MustCompile(`(?i)bfloat16 is only supported on GPUs with compute capability of at least ([\d.]+)\. Your (.+?) GPU (?:has compute capability ([\d.]+))?`)
	quantisation = regexp.MustCompile(`quantization method (\S+) is not supported for the current GPU\.? Minimum capability: (\d+)\.? Current capability: (\d+)`)
	architecture = regexp.MustCompile(`Model architectures (\[[^\]]*\]) (?:are not supported|failed to be inspected)`)
	modelType    = regexp.MustCompile("model type `?([A-Za-z0-9_.-]+)`? but Transformers does not recognize this architecture")
	workerDied   = regexp.MustCompile(`Worker proc (\S+) died unexpectedly`)
	worldSize    = regexp.MustCompile(`[Ww]orld size \((\d+)\) is larger than the number of available (?:GPUs|devices) \((\d+)\)`)
	headsDivide  = regexp.MustCompile(`(?:attention heads|kv heads) \((\d+)\) must be divisible by (?:the )?tensor parallel size \((\d+)\)`)
	derivedLen   = regexp.MustCompile(`max_model_len \((\d+)\) is greater than the derived max_model_len \([^\d]*?(\d+)`)
	shmFailed    = regexp.MustCompile(`failed to extend /dev/shm/(\S+) to (\d+) bytes`)
	serviceEnv   = regexp.MustCompile(`([A-Z][A-Z0-9_]*_PORT)\s+'?(tcp://[^' ]+)'?`)
	hubURL       = regexp.MustCompile(`(?:https?://[^/\s]+/(?:api/models/)?)([A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+)`)
	statusCode   = regexp.MustCompile(`(401|403|404|429) Client Error`)
	driverOld    = regexp.MustCompile(`driver on your system is too old \(found version (\d+)\)`)
	denied       = regexp.MustCompile(`Permission denied: '([^']+)'`)
	argumentBad  = regexp.MustCompile(`error: (unrecognized arguments: .+|argument [^\n]+)`)
	capability   = regexp.MustCompile(`compute capability ([\d.]+)`)
)

// repository names the model repository of a message of the hub.
func repository(m string) string {
	if found := hubURL.FindStringSubmatch(m); found != nil {
		return found[1]
	}
	return "the model"
}

// modelRoots are what lies below the model server.
func modelRoots() []string {
	return append(runtimeRoots(), "runtime.pod_without_gpu", "runtime.cgroup_device_lost", "gpu.allocatable", "host.disk.pressure", "storage.full")
}

// startup are the findings that end a model server before it serves.
func startup() []string {
	return []string{
		"model.kv_cache", "model.gpu_memory_busy", "model.oom_warmup", "model.oom", "model.dtype", "model.quantization", "model.architecture", "model.kernel_image",
		"model.no_device", "image.cuda_requirement", "model.shm", "model.nccl", "model.service_env_collision", "secrets.hf_token_missing", "model.license_not_accepted", "model.hf_rate_limited",
		"model.not_found", "model.offline_missing", "model.weights_corrupt", "model.remote_code", "model.jit_compiler", "model.permission", "model.argument",
		"model.tensor_parallel", "model.context_config", "storage.full", "storage.readonly", "model.xet", "net.pod_dns", "runtime.pod_without_gpu", "gpu.fabric", "model.oom_killed", "model.probe_budget",
	}
}

func modelChecks() []Check {
	return append(rows(
		saying{
			check: Check{
				ID: "model.kv_cache", Layer: LayerModel, Title: "Context too long for the GPU's memory", Rule: "room in the KV cache for one request of the model's full length",
				Fix:    "Name a shorter context: " + set("model.contextTokens=N"),
				Source: "vllm-project/vllm#2418, #16118, #34076; vllm v1/core/kv_cache_utils.py", Causes: []string{"model.gpu_memory_busy"},
			},
			ways: []way{
				{hint: "estimated maximum model length is", pattern: kvEstimate, judge: func(_ *facts, _ text, m []string) answer {
					return answer{
						measured: fmt.Sprintf("asked for %s tokens, which need %s GiB of KV cache; %s GiB are there, enough for %s tokens", m[1], m[2], m[3], m[4]),
						fix:      contextFix(m[4]),
					}
				}},
				{hint: "estimated maximum model length is", pattern: kvEstimate2, judge: func(_ *facts, _ text, m []string) answer {
					return answer{measured: "the KV cache holds " + m[1] + " tokens, fewer than the model's length", fix: contextFix(m[1])}
				}},
				{hint: "KV cache (", pattern: kvV0, judge: func(_ *facts, _ text, m []string) answer {
					return answer{measured: fmt.Sprintf("asked for %s tokens; the KV cache holds %s", m[1], m[2]), fix: contextFix(m[2])}
				}},
				{hint: "KV cache is needed", pattern: kvNeeded, judge: func(_ *facts, _ text, m []string) answer {
					return answer{measured: fmt.Sprintf("one request of full length needs %s GiB of KV cache; %s GiB are there", m[1], m[2])}
				}},
				{hint: "No available memory for the cache blocks", pattern: kvNone, judge: func(f *facts, _ text, _ []string) answer {
					return answer{
						measured: "the weights and the work space leave nothing for the KV cache" + f.memorySaid(),
						fix:      "Take a smaller or quantised model, such as the one llmbox would choose: llmbox models list. Or let vLLM have more: " + vllmArg("--gpu-memory-utilization=0.95"),
					}
				}},
			},
		},
		saying{
			check: Check{
				ID: "model.gpu_memory_busy", Layer: LayerModel, Title: "GPU memory in use", Rule: "no other program on the GPU when the model starts",
				Reads: "GPU processes, control groups, the model's log", Fix: "End what holds the GPU: sudo nvidia-smi shows it",
				Source: "vllm-project/vllm#20305, #23192; vllm-project/vllm-omni#2317", Causes: []string{"model.rollout_deadlock"},
			},
			ways: []way{
				{hint: "Free memory on device", pattern: freeMemory, judge: judgeFreeMemory},
				{hint: "rror in memory profiling", judge: func(f *facts, _ text, _ []string) answer {
					return answer{
						measured: "the GPU's free memory changed while the model measured it: another program started or ended" + f.holders(),
						fix:      f.endHolders(),
					}
				}},
			},
		},
		saying{
			check: Check{
				ID: "model.oom_warmup", Layer: LayerModel, Title: "GPU memory ran out while warming up", Rule: "memory left for the requests that vLLM warms up with",
				Source: "vllm-project/vllm#15105, #27508", Fix: "Let fewer requests run at once: " + vllmArg("--max-num-seqs=256"), Causes: []string{"model.gpu_memory_busy"},
			},
			ways: []way{
				{hint: "when warming up sampler", pattern: oomWarm, judge: func(f *facts, t text, m []string) answer {
					seqs := 256
					if n, err := strconv.Atoi(m[1]); err == nil && n <= seqs {
						seqs = max(n/2, 1)
					}
					measured := "no room for " + m[1] + " requests at once"
					if o := oomTorch.FindStringSubmatch(t.data); o != nil {
						measured += fmt.Sprintf(": %s wanted, %s of %s free", o[1], o[3], o[2])
					}
					return answer{measured: measured, fix: "Let fewer run at once: " + vllmArg("--max-num-seqs="+strconv.Itoa(seqs)) + ". Or leave more free: " + vllmArg("--gpu-memory-utilization=0.85")}
				}},
				{hint: "CUDA out of memory occurred when", judge: nil},
				{hint: "during CUDA graph capture", pattern: regexp.MustCompile(`(?i)out of memory[^\n]*during CUDA graph capture|CUDA graph capture[^\n]*out of memory`), judge: func(*facts, text, []string) answer {
					return answer{measured: "memory ran out while CUDA graphs were captured", fix: "Capture fewer: " + vllmArg("--max-num-seqs=128") + ". Or none: " + vllmArg("--enforce-eager")}
				}},
			},
		},
		saying{
			check: Check{
				ID: "model.oom", Layer: LayerModel, Title: "GPU memory ran out", Rule: "weights, work space and KV cache together within the GPU's memory",
				Source: "vllm-project/vllm docs, troubleshooting; pytorch/pytorch CUDA memory management", Causes: []string{"model.oom_warmup", "model.gpu_memory_busy", "model.kv_cache"},
				Fix: "Take a smaller or quantised model (llmbox models list), or leave more free: " + vllmArg("--gpu-memory-utilization=0.85"),
			},
			ways: []way{
				{hint: "CUDA out of memory", pattern: oomTorch, judge: func(_ *facts, _ text, m []string) answer {
					return answer{measured: fmt.Sprintf("%s wanted, %s of %s free", m[1], m[3], m[2])}
				}},
				{hint: "CUDA error: out of memory"}, {hint: "torch.OutOfMemoryError"}, {hint: "torch.cuda.OutOfMemoryError"}, {hint: "CUDA_ERROR_OUT_OF_MEMORY"}, {hint: "HIP out of memory"},
			},
		},
		saying{
			check: Check{
				ID: "model.dtype", Layer: LayerModel, Title: "Number format that this GPU does not have",
				Rule: "bfloat16 only on compute capability 8.0 and newer", Fix: vllmArg("--dtype=half") + ". GPUs before Ampere are outside what llmbox supports",
				Source: "vllm-project/vllm#1153, #1157",
			},
			ways: []way{{hint: "loat16 is only supported on GPUs", pattern: bf16, judge: func(_ *facts, _ text, m []string) answer {
				return answer{measured: fmt.Sprintf("%s has compute capability %s; bfloat16 asks for %s", m[2], cmp.Or(m[3], "unknown"), m[1])}
			}}},
		},
		saying{
			check: Check{
				ID: "model.quantization", Layer: LayerModel, Title: "Quantisation that this GPU does not have", Rule: "a GPU of the generation that the quantisation asks for",
				Source: "vllm-project/vllm#4327, #6979", Fix: "Take a variant of the model with another quantisation (AWQ, GPTQ or none): llmbox models list",
			},
			ways: []way{
				{hint: "is not supported for the current GPU", pattern: quantisation, judge: func(_ *facts, _ text, m []string) answer {
					return answer{measured: fmt.Sprintf("%s asks for compute capability %s, the GPU has %s", m[1], dotted(m[2]), dotted(m[3]))}
				}},
				{hint: "quantization is currently not supported"}, {hint: "Unknown quantization method"},
				{hint: "FP8 KV cache is not supported"}, {hint: "fp8e4nv not supported in this architecture"},
			},
		},
		saying{
			check: Check{
				ID: "model.architecture", Layer: LayerModel, Title: "Model that this vLLM does not know", Rule: "an architecture in vLLM's registry",
				Source: "vllm-project/vllm#22231, #9624, #32338", Fix: "Take a newer vLLM (components.model.values.images.vllm in /etc/llmbox/config.yaml), or a model of the catalogue: llmbox models list",
			},
			ways: []way{
				{hint: "Model architectures [", pattern: architecture, judge: func(_ *facts, t text, m []string) answer {
					measured := m[1] + " is not in this image's registry"
					// An import that failed looks the same (vllm-project/vllm#9377).
					if i := strings.Index(t.data, "undefined symbol"); i >= 0 {
						measured += "; behind it: " + oneLine(lineAround(t.data, i))
					}
					return answer{measured: measured}
				}},
				{hint: "Transformers does not recognize this architecture", pattern: modelType, judge: func(_ *facts, _ text, m []string) answer {
					return answer{measured: "model type " + m[1] + " is newer than the image's Transformers"}
				}},
				{hint: "has no vLLM implementation"},
			},
		},
		saying{
			check: Check{
				ID: "model.kernel_image", Layer: LayerModel, Title: "Image without kernels for this GPU", Rule: "an image that was built for the GPU's compute capability",
				Source: "vllm-project/vllm docs, installation/gpu; pytorch/pytorch#90761", Fix: "Take an image that was built for this GPU: a newer vLLM in components.model.values.images.vllm of /etc/llmbox/config.yaml",
			},
			ways: []way{
				{hint: "no kernel image is available for execution on the device", judge: func(f *facts, _ text, _ []string) answer {
					return answer{measured: "the image has no kernels for " + f.gpuName()}
				}},
				{hint: "is not compatible with the current PyTorch installation"}, {hint: "FlashAttention only supports Ampere GPUs or newer"},
				{hint: "ptxas fatal", pattern: regexp.MustCompile(`ptxas fatal\s*:?\s*(?:Value )?'?sm_\w+'? is not defined`)},
			},
		},
		saying{
			check: Check{
				ID: "model.no_device", Layer: LayerModel, Title: "No GPU in the model's container", Rule: "a GPU that CUDA can open inside the pod",
				Source: "vllm-project/vllm#27268; pytorch/pytorch#130181", Fix: "See what the container has: kubectl -n llm exec deploy/model-server -- nvidia-smi",
				Causes: modelRoots(),
			},
			ways: []way{
				{hint: "No CUDA GPUs are available"}, {hint: "no CUDA-capable device is detected"}, {hint: "CUDA_ERROR_NO_DEVICE"},
				{hint: "CUDA unknown error - this may be due to an incorrectly set up environment"}, {hint: "cuInit", pattern: regexp.MustCompile(`cuInit\S* (?:failed|returned)[^\n]*(?:999|100|unknown)`)},
				{hint: "libcuda.so.1: cannot open shared object file", judge: func(*facts, text, []string) answer { return answer{id: "runtime.pod_without_gpu"} }},
			},
		},
		saying{
			check: Check{
				ID: "model.shm", Layer: LayerModel, Title: "Shared memory too small", Rule: "/dev/shm in memory where several GPUs work together",
				Reads: "the model's log, mounts of its pod", Fix: "Mount an emptyDir with medium Memory at /dev/shm; llmbox's own chart does: " + "sudo llmbox install",
				Source: "NVIDIA/nccl#525; vllm-project/vllm#1710; vllm-project/production-stack#899",
			},
			ways: []way{
				{hint: "failed to extend /dev/shm", pattern: shmFailed, judge: func(f *facts, t text, m []string) answer {
					return answer{measured: "/dev/shm is full: " + m[2] + " bytes more for " + m[1] + f.shmOf(t)}
				}},
				{hint: "/dev/shm", pattern: regexp.MustCompile(`/dev/shm[^\n]*(?:No space left on device|too small)|(?:No space left on device|unable to (?:open|allocate) shared memory)[^\n]*/dev/shm`)},
				{hint: "Bus error", pattern: regexp.MustCompile(`Bus error[^\n]*(?:shm|shared memory)`)}, {hint: "insufficient shared memory (shm)"},
			},
		},
		saying{
			check: Check{
				ID: "model.nccl", Layer: LayerModel, Title: "GPUs that don't reach each other", Rule: "GPUs of one model exchange data",
				Source: "NVIDIA/nccl#2079; vllm-project/vllm#9920, #51513", Fix: "Go without direct access between GPUs: " + set("components.model.values.env.NCCL_P2P_DISABLE=1"),
				Causes: []string{"model.shm", "gpu.*", "gpu.ecc.remap_pending", "gpu.p2p.iommu", "gpu.xid.48", "gpu.xid.63", "gpu.xid.74"},
			},
			ways: []way{
				{hint: "No available shared memory broadcast block found"}, {hint: "NCCL error"}, {hint: "Watchdog caught collective operation timeout"},
				{hint: "NCCL WARN Cuda failure"}, {hint: "ncclUnhandledCudaError"}, {hint: "ncclSystemError"},
			},
			where: func(_ *facts, t text) bool { return !strings.Contains(t.data, "failed to extend /dev/shm") },
		},
		saying{
			check: Check{
				ID: "secrets.hf_token_missing", Also: []string{"model.license_not_accepted"}, Layer: LayerSecret, Title: "Hugging Face token", Rule: "a valid token for a model behind a licence",
				Reads: "logs of the model server and of the download", Source: "huggingface/text-generation-inference#827; opea-project/GenAIInfra#100",
				Fix: "Write a token from huggingface.co/settings/tokens into a file and: sudo llmbox install --hf-token-file FILE",
			},
			ways: []way{
				{hint: "gated repo", judge: judgeGated}, {hint: "GatedRepoError", judge: judgeGated}, {hint: "Invalid user token", judge: judgeGated},
				{hint: "Invalid credentials in Authorization header", judge: judgeGated}, {hint: "Access to model", judge: judgeGated},
				{hint: "401 Client Error", pattern: regexp.MustCompile(`(?s)401 Client Error.{0,400}huggingface`), judge: judgeGated},
				{hint: "the licence of the model is not accepted", judge: func(*facts, text, []string) answer { return answer{id: "model.license_not_accepted"} }},
			},
		},
		saying{
			check: Check{
				ID: "model.license_not_accepted", Layer: LayerModel, Title: "Licence of the model", Rule: "access to the model granted to the token's owner",
				Source: "huggingface/text-generation-inference#827; huggingface.co/docs/hub/models-gated", Fix: "Open the model's page on huggingface.co with the account of the token, accept its terms, then: sudo llmbox install",
			},
			ways: []way{
				{hint: "not in the authorized list", judge: judgeGated}, {hint: "awaiting a review from the repo authors", judge: judgeGated},
				{hint: "403 Client Error", pattern: regexp.MustCompile(`(?s)403 Client Error.{0,400}huggingface`), judge: judgeGated},
			},
		},
		saying{
			check: Check{
				ID: "model.hf_rate_limited", Layer: LayerModel, Title: "Hugging Face lets no more requests through", Rule: "fewer requests than the quota",
				Source: "pytorch/pytorch#170150; huggingface/transformers#34841", Fix: "Wait five minutes; a token has a higher quota: sudo llmbox install --hf-token-file FILE. The cache on the volume keeps a restart from asking again",
			},
			ways: []way{
				{hint: "you hit the quota of", pattern: regexp.MustCompile(`you hit the quota of (\d+) api requests per (\d+) minutes`), judge: func(f *facts, _ text, m []string) answer {
					return answer{measured: fmt.Sprintf("quota of %s requests in %s minutes used up%s", m[1], m[2], f.cacheSaid())}
				}},
				{hint: "429 Client Error", pattern: regexp.MustCompile(`(?s)429 Client Error.{0,300}(?:huggingface|hf\.co)`)},
				{hint: "HTTP status 429", pattern: regexp.MustCompile(`(?:huggingface|hf\.co)[^\n]*HTTP status 429`)},
			},
		},
		saying{
			check: Check{
				ID: "model.not_found", Layer: LayerModel, Title: "Model that the hub does not have", Rule: "a repository of that name and revision",
				Source: "huggingface_hub src/huggingface_hub/errors.py", Fix: "Check the name on huggingface.co, then: " + set("model.name=ORG/NAME"), Causes: []string{"secrets.hf_token_missing"},
			},
			ways: []way{
				{hint: "RepositoryNotFoundError"}, {hint: "Repository Not Found for url"}, {hint: "is not a valid model identifier"}, {hint: "RevisionNotFoundError"}, {hint: "Revision Not Found for url"},
				{hint: "404 Client Error", pattern: regexp.MustCompile(`(?s)404 Client Error.{0,300}(?:huggingface|hf\.co)`)},
			},
		},
		saying{
			check: Check{
				ID: "model.offline_missing", Layer: LayerModel, Title: "Weights that are not on the volume", Rule: "every file of the model in the cache, for the pod has no way out",
				Source: "ggml-org/llama.cpp#21677; huggingface_hub docs, HF_HUB_OFFLINE", Fix: "Fetch what is missing: sudo llmbox install",
				Causes: []string{"secrets.hf_token_missing", "model.license_not_accepted", "model.hf_rate_limited", "storage.full", "host.disk.pressure", "storage.pvc_pending"},
			},
			ways: []way{
				{hint: "outgoing traffic has been disabled"}, {hint: "LocalEntryNotFoundError"}, {hint: "couldn't find them in the cached files"}, {hint: "OfflineModeIsEnabled"},
				{hint: "Cannot find an appropriate cached snapshot folder"}, {hint: "Cannot find any model weights with"},
			},
		},
		saying{
			check: Check{
				ID: "model.weights_corrupt", Layer: LayerModel, Title: "Damaged weights", Rule: "weights that are what their checksums say",
				Source: "huggingface/safetensors src/tensor.rs; vllm-project/vllm#11449", Fix: "Check them against their checksums and fetch what is wrong: sudo llmbox install",
				Causes: []string{"storage.full", "host.disk.pressure"},
			},
			ways: []way{
				{hint: "SafetensorError"}, {hint: "HeaderTooLarge"}, {hint: "MetadataIncompleteBuffer"}, {hint: "invalid load key"}, {hint: "PytorchStreamReader failed"},
				{hint: "incomplete metadata, file not fully covered"},
			},
		},
		saying{
			check: Check{
				ID: "model.remote_code", Layer: LayerModel, Title: "Model that brings code of its own", Rule: "a model that vLLM runs without code from its repository",
				Source: "huggingface/transformers docs, custom models", Fix: "Read that code, then allow it: " + vllmArg("--trust-remote-code"),
			},
			ways: []way{{hint: "trust_remote_code=True"}, {hint: "contains custom code which must be executed"}},
		},
		saying{
			check: Check{
				ID: "model.chat_template", Layer: LayerModel, Title: "Chat template", Rule: "a chat template in the model's tokenizer, or one of yours",
				Source: "vllm-project/vllm#17977, #18140, #39279", Fix: "Take the instruct variant of the model, or give it a template: " + vllmArg("--chat-template=FILE"),
			},
			ways: []way{{hint: "default chat template is no longer allowed"}, {hint: "tokenizer.chat_template is not set"}, {hint: "does not define a chat template"}},
		},
		saying{
			check: Check{
				ID: "model.jit_compiler", Layer: LayerModel, Title: "Kernels that are compiled at run time", Rule: "a compiler in the image, or kernels made beforehand",
				Source: "vllm-project/vllm#36077, #44305, #50705", Fix: set("components.model.values.env.VLLM_USE_FLASHINFER_SAMPLER=0"),
			},
			ways: []way{
				{hint: "Could not find nvcc"}, {hint: "Ninja build failed"}, {hint: "Failed to find C compiler"}, {hint: "Error building extension"}, {hint: "CUDA_HOME environment variable is not set"},
				{hint: "flashinfer", pattern: regexp.MustCompile(`flashinfer[^\n]*(?:ninja|nvcc|compil)[^\n]*(?:fail|not found|error)`)},
			},
		},
		saying{
			check: Check{
				ID: "model.permission", Layer: LayerModel, Title: "Directory that the model server can't write", Rule: "the model's volume owned by user 2000",
				Source: "kserve/kserve#4565; kubernetes docs, fsGroup", Fix: "sudo chown -R 2000:2000 /var/lib/llmbox/models",
			},
			ways: []way{{hint: "[Errno 13] Permission denied", pattern: denied, judge: func(_ *facts, _ text, m []string) answer {
				return answer{measured: "no right to write " + m[1]}
			}}},
			where: func(f *facts, t text) bool { return f.modelText(t) },
		},
		saying{
			check: Check{
				ID: "model.argument", Layer: LayerModel, Title: "Argument that vLLM does not take", Rule: "arguments that this release of vLLM knows",
				Source: "docs.vllm.ai, vllm serve", Fix: "Correct model.extraArgs in /etc/llmbox/config.yaml, then: sudo llmbox install",
			},
			ways: []way{
				{hint: "error: ", pattern: argumentBad, judge: func(_ *facts, _ text, m []string) answer { return answer{measured: oneLine(m[1])} }},
				{hint: "validation error for ", pattern: regexp.MustCompile(`(?s)validation errors? for (\w+Config)\n?(.{0,200})`), judge: func(_ *facts, t text, m []string) answer {
					// A setting that another row explains in full is not said twice.
					if strings.Contains(m[2], "max_model_len") || strings.Contains(t.data, "oat16 is only supported") || architecture.MatchString(t.data) || modelType.MatchString(t.data) {
						return answer{ignore: true}
					}
					return answer{measured: m[1] + ": " + oneLine(m[2])}
				}},
			},
			where: func(f *facts, t text) bool { return f.modelText(t) },
		},
		saying{
			check: Check{
				ID: "model.tensor_parallel", Layer: LayerModel, Title: "Number of GPUs for the model", Rule: "a number of GPUs that is there and divides the model's attention heads",
				Source: "docs.vllm.ai, parallelism and scaling", Fix: vllmArg("--tensor-parallel-size=1"), Causes: []string{"gpu.count", "gpu.mig.enabled_without_instances", "gpu.allocatable"},
			},
			ways: []way{
				{hint: "orld size (", pattern: worldSize, judge: func(_ *facts, _ text, m []string) answer {
					return answer{measured: m[1] + " GPUs asked for, " + m[2] + " in the pod", fix: vllmArg("--tensor-parallel-size=" + m[2])}
				}},
				{hint: "must be divisible by", pattern: headsDivide, judge: func(_ *facts, _ text, m []string) answer {
					return answer{measured: m[1] + " attention heads don't divide by " + m[2] + " GPUs", fix: vllmArg("--tensor-parallel-size=" + divisor(m[1], m[2]))}
				}},
			},
		},
		saying{
			check: Check{
				ID: "model.context_config", Layer: LayerModel, Title: "Context longer than the model's own", Rule: "at most the length in the model's config.json",
				Source: "vllm-project/vllm vllm/config/model.py", Fix: set("model.contextTokens=0"),
			},
			ways: []way{{hint: "greater than the derived max_model_len", pattern: derivedLen, judge: func(_ *facts, _ text, m []string) answer {
				return answer{measured: "asked for " + m[1] + " tokens, the model was made for " + m[2], fix: set("model.contextTokens=" + m[2])}
			}}},
		},
		saying{
			check: Check{
				ID: "model.xet", Layer: LayerModel, Title: "Hugging Face's storage can't be reached", Rule: "the hosts of Xet let through, beside huggingface.co",
				Source: "huggingface/transformers#43023", Fix: "Let *.xethub.hf.co through, or go without it: HF_HUB_DISABLE_XET=1", Causes: []string{"net.dns.resolve", "net.hosts", "net.tls_interception", "net.proxy"},
			},
			ways: []way{{hint: "CAS service error"}, {hint: "xethub.hf.co", pattern: regexp.MustCompile(`xethub\.hf\.co[^\n]*(?:error|failed|timed out)`)}},
		},
		saying{
			check: Check{
				ID: "model.engine_dead", Layer: LayerModel, Title: "Engine of the model server died", Rule: "an engine that lives as long as its server",
				Reads: "the model's log, how its container ended, Xids", Source: "vllm-project/vllm#48966, #39863, #24897",
				Fix:    "See what the engine said last: kubectl -n llm logs deploy/model-server --previous --tail=200. Then: kubectl -n llm rollout restart deploy/model-server",
				Repair: "model.restart",
				Causes: append(startup(), append(modelRoots(), "gpu.ecc.remap_pending", "gpu.ecc.uncorrected", "gpu.xid.48", "gpu.xid.63", "gpu.xid.74", "gpu.xid.154", "host.oom")...),
			},
			ways: []way{
				{hint: "died unexpectedly", pattern: workerDied, judge: func(f *facts, t text, m []string) answer {
					return answer{measured: "worker " + m[1] + " died" + f.endedHow(t)}
				}},
				{hint: "EngineDeadError", judge: func(f *facts, t text, _ []string) answer {
					return answer{measured: "the engine ended while serving" + f.endedHow(t)}
				}},
				{hint: "EngineCore encountered a fatal error", judge: func(f *facts, t text, _ []string) answer {
					return answer{measured: "the engine ended while serving" + f.endedHow(t)}
				}},
				{hint: "AsyncEngineDeadError", judge: func(f *facts, t text, _ []string) answer {
					return answer{measured: "the engine's background loop ended" + f.endedHow(t)}
				}},
				{hint: "Background loop has errored already"}, {hint: "Engine core initialization failed", judge: func(f *facts, t text, _ []string) answer {
					return answer{measured: "the engine did not start" + f.endedHow(t)}
				}},
				{hint: "CUDA error: an illegal memory access was encountered"}, {hint: "CUDA error: unspecified launch failure"}, {hint: "uncorrectable ECC error encountered"},
			},
		},
	), modelStates()...)
}

// contextFix is how a context of that many tokens is set.
func contextFix(tokens string) string {
	return set("model.contextTokens="+tokens) + " (vLLM: --max-model-len " + tokens + ")"
}

func dotted(n string) string {
	if len(n) == 2 || len(n) == 3 {
		return n[:len(n)-1] + "." + n[len(n)-1:]
	}
	return n
}

// divisor is the largest number of GPUs up to most that divides the heads.
func divisor(heads, most string) string {
	h, err := strconv.Atoi(heads)
	m, err2 := strconv.Atoi(most)
	if err != nil || err2 != nil || h <= 0 {
		return "1"
	}
	for n := min(m, 64) - 1; n > 1; n-- {
		if h%n == 0 && n&(n-1) == 0 {
			return strconv.Itoa(n)
		}
	}
	return "1"
}

func judgeFreeMemory(f *facts, _ text, m []string) answer {
	free, err1 := strconv.ParseFloat(m[1], 64)
	total, err2 := strconv.ParseFloat(m[2], 64)
	wanted, err3 := strconv.ParseFloat(m[4], 64)
	a := answer{measured: fmt.Sprintf("free %s of %s GiB, %s GiB wanted", m[1], m[2], m[4]) + f.holders(), fix: f.endHolders()}
	if err1 == nil && err2 == nil && err3 == nil && total > 0 && free > 0.9*wanted && f.holders() == "" {
		// Nobody is there: the share asked for is a little more than the driver leaves.
		a.fix = "Ask for a little less: " + vllmArg(fmt.Sprintf("--gpu-memory-utilization=%.2f", float64(int((free/total)*100-1))/100))
	}
	return a
}

// holders says who has memory of the GPU.
func (f *facts) holders() string {
	if f.GPU == nil {
		return ""
	}
	var out []string
	for _, d := range f.GPU.Devices {
		for _, p := range d.Processes {
			text := "pid " + strconv.Itoa(p.PID)
			if p.Name != "" {
				text += " " + p.Name
			}
			if p.UsedBytes != nil {
				text += fmt.Sprintf(" %.1f GiB", float64(*p.UsedBytes)/(1<<30))
			}
			if group := f.File(fmt.Sprintf("/proc/%d/cgroup", p.PID)).Data; strings.Contains(group, "docker") {
				text += " (a container of Docker)"
			}
			out = append(out, text)
		}
	}
	if len(out) == 0 {
		return ""
	}
	return "; held by " + some(4, out)
}

func (f *facts) endHolders() string {
	if f.GPU != nil {
		for _, d := range f.GPU.Devices {
			for _, p := range d.Processes {
				if strings.Contains(f.File(fmt.Sprintf("/proc/%d/cgroup", p.PID)).Data, "docker") {
					return "Stop the container that has it (sudo docker ps shows it), or: sudo kill " + strconv.Itoa(p.PID)
				}
				return "End what holds it: sudo kill " + strconv.Itoa(p.PID)
			}
		}
	}
	return "Find who holds it and end that: sudo nvidia-smi"
}

// gpuName is the first GPU's name with its compute capability.
func (f *facts) gpuName() string {
	if f.GPU == nil || len(f.GPU.Devices) == 0 {
		return "this GPU"
	}
	d := f.GPU.Devices[0]
	name := cmp.Or(d.Name, "this GPU")
	if d.ComputeMajor != nil && d.ComputeMinor != nil {
		name += fmt.Sprintf(" (compute capability %d.%d)", *d.ComputeMajor, *d.ComputeMinor)
	}
	return name
}

// modelText says whether a text comes from a model server or its download.
func (f *facts) modelText(t text) bool {
	if p := f.podsByKey[t.namespace+"/"+t.pod]; p != nil {
		return isModel(p) || p.Namespace == "llm"
	}
	return !systemNamespace(t.namespace)
}

func systemNamespace(name string) bool {
	return slices.Contains([]string{
		"kube-system", "kube-public", "gpu-operator", "envoy-gateway-system", "monitoring", "keda", "vault", "external-secrets", "kyverno", "llmbox-system",
	}, name)
}

// shmOf says what the pod of a log mounts at /dev/shm.
func (f *facts) shmOf(t text) string {
	p := f.podsByKey[t.namespace+"/"+t.pod]
	if p == nil {
		return ""
	}
	size, ok := sharedMemory(p)
	switch {
	case !ok:
		return "; the pod mounts nothing there, so that it is 64 MiB"
	case size != "":
		return "; the pod's own is limited to " + size
	}
	return ""
}

// sharedMemory is the limit of a pod's /dev/shm; ok is false where it has none in
// memory.
func sharedMemory(p *corev1.Pod) (limit string, ok bool) {
	for _, c := range p.Spec.Containers {
		for _, m := range c.VolumeMounts {
			if m.MountPath != "/dev/shm" {
				continue
			}
			for _, v := range p.Spec.Volumes {
				if v.Name == m.Name && v.EmptyDir != nil && v.EmptyDir.Medium == corev1.StorageMediumMemory {
					if v.EmptyDir.SizeLimit != nil {
						return v.EmptyDir.SizeLimit.String(), true
					}
					return "", true
				}
			}
		}
	}
	return "", false
}

func (f *facts) cacheSaid() string {
	for _, p := range f.models() {
		if restarts(p) > 0 && !persistent(p) {
			return "; the pod has no volume for the weights and fetches them at each of its " + strconv.Itoa(int(restarts(p))) + " restarts"
		}
	}
	return ""
}

// persistent says whether a pod mounts a volume that outlives it.
func persistent(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool { return v.PersistentVolumeClaim != nil || v.HostPath != nil })
}

// judgeGated tells a missing token from access that was not granted, by the status of
// the hub's answer: 401 asks who it is, 403 knows and refuses.
func judgeGated(f *facts, t text, _ []string) answer {
	codes := statusCode.FindAllStringSubmatch(t.data, -1)
	last := ""
	if len(codes) > 0 {
		last = codes[len(codes)-1][1]
	}
	name := repository(t.data)
	switch {
	case last == "403", last == "" && (strings.Contains(t.data, "not in the authorized list") || strings.Contains(t.data, "awaiting a review")):
		return answer{
			id: "model.license_not_accepted", measured: "the token is valid, access to " + name + " is not granted (403)",
			fix: "Open https://huggingface.co/" + name + " with the account of the token, accept its terms, then: sudo llmbox install",
		}
	case last == "404", last == "429":
		return answer{ignore: true}
	}
	if strings.Contains(t.data, "Repository Not Found") && !strings.Contains(t.data, "Cannot access gated repo") && !strings.Contains(t.data, "GatedRepoError") {
		return answer{ignore: true}
	}
	measured := name + " asks who it is (401): no token, or one that is not valid"
	if strings.Contains(t.data, "Invalid user token") || strings.Contains(t.data, "Invalid credentials") {
		measured = "the token is not valid (401)"
	}
	return answer{id: "secrets.hf_token_missing", measured: measured}
}

// endedHow says how the container of a log ended.
func (f *facts) endedHow(t text) string {
	p := f.podsByKey[t.namespace+"/"+t.pod]
	if p == nil {
		return ""
	}
	for _, c := range p.Status.ContainerStatuses {
		ended := c.LastTerminationState.Terminated
		if c.State.Terminated != nil {
			ended = c.State.Terminated
		}
		if c.Name != t.container && t.container != "" || ended == nil {
			continue
		}
		out := fmt.Sprintf("; the container ended with exit code %d", ended.ExitCode)
		if ended.ExitCode == 0 {
			out += ", which is no success for a server"
		}
		return out
	}
	return ""
}

var (
	v0Profile = regexp.MustCompile(`total_gpu_memory \(([\d.]+)GiB\) x gpu_memory_utilization \(([\d.]+)\) = ([\d.]+)GiB`)
	v0Parts   = regexp.MustCompile(`model weights take ([\d.]+)GiB; non_torch_memory takes (-?[\d.]+)GiB; PyTorch activation peak memory takes ([\d.]+)GiB; the rest of the memory reserved for KV Cache is (-?[\d.]+)GiB`)
	v1Weights = regexp.MustCompile(`Model loading took ([\d.]+) Gi?B(?: memory)? and ([\d.]+) seconds`)
	v1Cache   = regexp.MustCompile(`Available KV cache memory: (-?[\d.]+) GiB`)
	v1Tokens  = regexp.MustCompile(`GPU KV cache size: ([\d,]+) tokens`)
	v1Conc    = regexp.MustCompile(`Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x`)
	v1Graph   = regexp.MustCompile(`Graph capturing finished in ([\d.]+) secs, took ([\d.]+) GiB`)
	v1Init    = regexp.MustCompile(`init engine \([^)]*\) took ([\d.]+) seconds`)
	v1Compile = regexp.MustCompile(`torch\.compile (?:takes|took) ([\d.]+) s in total`)
)

// memory is what vLLM said of the GPU's memory; the last log that says so counts.
func (f *facts) memory() (measured string, from finding.Evidence, ok bool) {
	for _, t := range f.texts {
		if t.kind != "log" || t.previous {
			continue
		}
		if m := lastOf(v0Profile, t.data); m != nil {
			measured = fmt.Sprintf("%s GiB x %s = %s GiB", m[1], m[2], m[3])
			if p := lastOf(v0Parts, t.data); p != nil {
				measured += fmt.Sprintf("; weights %s, other %s, peak %s, KV cache %s GiB", p[1], p[2], p[3], p[4])
			}
			return measured, t.evidence(m[0]), true
		}
		m := lastOf(v1Cache, t.data)
		if m == nil {
			continue
		}
		var parts []string
		if w := lastOf(v1Weights, t.data); w != nil {
			parts = append(parts, "weights "+short(w[1])+" GiB")
		}
		cache := "KV cache " + m[1] + " GiB"
		if n := lastOf(v1Tokens, t.data); n != nil {
			cache += " = " + n[1] + " tokens"
		}
		parts = append(parts, cache)
		if c := lastOf(v1Conc, t.data); c != nil {
			parts = append(parts, fmt.Sprintf("%sx at %s tokens", c[2], c[1]))
		}
		if g := lastOf(v1Graph, t.data); g != nil {
			parts = append(parts, "graphs "+g[2]+" GiB")
		}
		return strings.Join(parts, ", "), t.evidence(m[0]), true
	}
	return "", finding.Evidence{}, false
}

func (f *facts) memorySaid() string {
	if said, _, ok := f.memory(); ok {
		return " (" + said + ")"
	}
	return ""
}

// short cuts a figure to two decimals.
func short(n string) string {
	v, err := strconv.ParseFloat(n, 64)
	if err != nil {
		return n
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}

func lastOf(pattern *regexp.Regexp, data string) []string {
	all := pattern.FindAllStringSubmatch(data, -1)
	if len(all) == 0 {
		return nil
	}
	return all[len(all)-1]
}

// modelStates are the rows on the model server that structured facts decide.
func modelStates() []Check {
	return []Check{
		{
			ID: "model.memory", Layer: LayerModel, Title: "GPU memory of the model", Reads: "vLLM's memory profile in the model's log", Rule: "weights and KV cache within the GPU's memory",
			Source: "docs.vllm.ai, conserving memory; vllm v1/worker/gpu_worker.py", Judge: judgeMemory, Fix: "Name a shorter context or a smaller model: llmbox models list",
		},
		{
			ID: "model.ready", Also: []string{"model.starting"}, Layer: LayerNote, Title: "Model server", Reads: "state, probes and log of the model's pod", Rule: "the model's pod ready",
			Source: "vllm-project/vllm#20264, #34399", Judge: judgeModelReady, Fix: "kubectl -n llm describe pod -l app.kubernetes.io/name=model-server",
		},
		{
			ID: "model.missing", Layer: LayerModel, Title: "Model server not running", Reads: "Deployment or StatefulSet model-server and its pods", Rule: "at least one replica",
			Source: "kubernetes docs, Deployments; kedacore/keda#1850", Judge: judgeModelMissing, Fix: "kubectl -n llm scale deploy/model-server --replicas=1",
			Causes: append(nodeRoots(), "operator.webhook.blocking", "operator.policy_denied", "helm.release.pending"),
		},
		{
			ID: "model.oom_killed", Layer: LayerModel, Title: "Memory of the machine ran out under the model", Reads: "reason in the container's last state, the kernel's log", Rule: "no container ended by the kernel for want of memory",
			Source: "vllm-project/vllm#28923; kubernetes docs, OOMKilled", Judge: judgeOOMKilled,
			Fix: "Give the pod more: " + set("components.model.values.resources.memoryLimitMiB=N") + ". The limit must hold the largest shard of the weights for each GPU",
		},
		{
			ID: "model.probe_budget", Layer: LayerModel, Title: "Probe that ends the model while it loads", Reads: "events Killing and Unhealthy, last state, log of the run before", Rule: "a start-up probe that waits as long as loading takes",
			Source: "kserve/kserve#5062, #5063; vllm-project/aibrix#772", Judge: judgeProbeBudget,
			Fix: "Let it take longer: " + set("components.model.values.startup.budgetSeconds=3600"), Causes: startup(),
		},
		{
			ID: "model.service_env_collision", Layer: LayerModel, Title: "Service whose variables vLLM reads as its own", Reads: "Services, enableServiceLinks of the pod, the model's log",
			Rule: "no Service named vllm beside a pod with service links", Source: "vllm-project/vllm#15613, #34199", Judge: judgeServiceEnv,
			Fix: "Rename the Service, or set enableServiceLinks: false in the pod; llmbox's own chart does both: sudo llmbox install",
		},
		{
			ID: "model.rollout_deadlock", Layer: LayerSchedule, Title: "New model pod waits for the GPU of the old one", Reads: "pods, owners, strategy and allocatable GPUs", Rule: "strategy Recreate where no GPU is free",
			Source: "defilantech/LLMKube#192; vllm-project/production-stack#103", Judge: judgeRollout,
		},
		{
			ID: "model.hang", Layer: LayerModel, Title: "Model server that answers and does not work", Reads: "vLLM's own metrics", Rule: "requests run while some wait",
			Source: "vllm-project/vllm#39863", Judge: judgeHang, Fix: "kubectl -n llm rollout restart deploy/model-server", Repair: "model.restart",
			Causes: append(gpuRoots(), "gpu.ecc.remap_pending", "model.nccl"),
		},
		{
			ID: "model.redownload", Layer: LayerModel, Title: "Weights that are fetched at each start", Reads: "volumes of the model's pod", Rule: "a volume that outlives the pod",
			Source: "vectorize-io/hindsight#861; llm-d/llm-d-deployer#324", Judge: judgeRedownload, Fix: "Mount a volume at HF_HOME; llmbox's own chart does: sudo llmbox install",
		},
		{
			ID: "model.scales_to_zero", Layer: LayerNote, Title: "Model that scales to nothing without figures", Reads: "ScaledObjects", Rule: "a fallback, or at least one replica",
			Source: "kedacore/keda#2244, #5663", Judge: judgeScalesToZero, Fix: "Set minReplicaCount: 1, or a fallback, in the ScaledObject",
		},
	}
}

func judgeMemory(f *facts) []finding.Finding {
	measured, from, ok := f.memory()
	if !ok {
		return nil
	}
	return well(measured, from)
}

func judgeModelReady(f *facts) []finding.Finding {
	models := f.models()
	if len(models) == 0 {
		for _, t := range f.texts {
			if t.kind != "log" || t.previous || !strings.Contains(t.data, "Application startup complete") || strings.Contains(t.data, "EngineDeadError") || strings.Contains(t.data, "shutdown complete") {
				continue
			}
			measured := "started"
			if said, _, found := f.memory(); found {
				measured += ": " + said
			}
			if m := lastOf(v1Init, t.data); m != nil {
				measured += fmt.Sprintf(", engine ready in %s s", trimZeros(m[1]))
			}
			return well(measured, t.evidence("Application startup complete."))
		}
		return nil
	}
	var out []finding.Finding
	readyPods, starting := 0, []string{}
	for _, p := range models {
		if ready(p) && p.Status.Phase == corev1.PodRunning {
			readyPods++
			continue
		}
		if p.Status.Phase == corev1.PodRunning && restarts(p) == 0 && !failing(p) {
			starting = append(starting, p.Name+": "+f.progress(p))
		}
	}
	switch {
	case readyPods > 0:
		measured := count(readyPods, "pod") + " ready"
		if said, _, ok := f.memory(); ok {
			measured += "; " + said
		}
		out = well(measured, at("pods", podKey(models[0]), "Ready"))
	case len(starting) > 0:
		out = named("model.starting", note(strings.Join(starting, "; "), at("pods", podKey(models[0]), "Running")))
		out[0].State, out[0].Title = finding.Wait, "Model server is starting"
	}
	return out
}

func trimZeros(n string) string {
	if strings.Contains(n, ".") {
		n = strings.TrimSuffix(strings.TrimRight(n, "0"), ".")
	}
	return n
}

var shards = regexp.MustCompile(`Loading (?:safetensors|pt) checkpoint shards:\s+(\d+)% Completed \| (\d+)/(\d+)`)

// progress is how far a model server has come, by its own words.
func (f *facts) progress(p *corev1.Pod) string {
	data := ""
	for _, t := range f.texts {
		if t.kind == "log" && !t.previous && t.namespace == p.Namespace && t.pod == p.Name {
			data += t.data
		}
	}
	switch {
	case strings.Contains(data, "Graph capturing"), strings.Contains(data, "Capturing CUDA graph"):
		return "capturing graphs"
	case strings.Contains(data, "torch.compile"), strings.Contains(data, "Compiling a graph"):
		return "compiling"
	}
	if m := lastOf(shards, data); m != nil {
		return fmt.Sprintf("loading weights, %s of %s parts", m[2], m[3])
	}
	return "not ready yet"
}

// failing says whether a container of a pod waits for a reason that does not pass, or
// has ended badly.
func failing(p *corev1.Pod) bool {
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if w := c.State.Waiting; w != nil && w.Reason != "" && w.Reason != "ContainerCreating" && w.Reason != "PodInitializing" {
			return true
		}
		if t := c.State.Terminated; t != nil && t.ExitCode != 0 {
			return true
		}
		if t := c.LastTerminationState.Terminated; t != nil && !c.Ready {
			return true
		}
	}
	return p.Status.Phase == corev1.PodFailed
}

func judgeModelMissing(f *facts) []finding.Finding {
	check := func(namespace, name string, wanted *int32, have int32, kind string) []finding.Finding {
		if name != "model-server" {
			return nil
		}
		n := int32(1)
		if wanted != nil {
			n = *wanted
		}
		if n == 0 {
			if o, ok := f.scaledBy(namespace, name); ok {
				paused := conditionIn(nestedList(o.Object, "status", "conditions"), "Paused")
				switch {
				case paused.status == "True":
					return fail("0 replicas, and KEDA is paused by an annotation of "+fullName(o),
						"kubectl -n "+namespace+" annotate scaledobject "+o.GetName()+" autoscaling.keda.sh/paused- autoscaling.keda.sh/paused-replicas-", at("scaledobjects", fullName(o), paused.String()))
				case scalesToNothing(o):
					// On purpose: it comes back with the first request.
					return note("scaled to nothing by KEDA; the first request has to wait for it", at(kind, namespace+"/"+name, "replicas: 0"))
				}
			}
			return fail("scaled to 0 replicas", "kubectl -n "+namespace+" scale deploy/"+name+" --replicas=1", at(kind, namespace+"/"+name, "replicas: 0"))
		}
		if have == 0 && f.had["pods"] && !slices.ContainsFunc(f.models(), func(p *corev1.Pod) bool { return p.Namespace == namespace && p.DeletionTimestamp == nil }) {
			return fail("no pod although "+strconv.Itoa(int(n))+" is asked for: "+cmp.Or(f.newestEvent(namespace, name), "nothing says why"),
				"kubectl -n "+namespace+" describe rs -l app.kubernetes.io/name=model-server", at(kind, namespace+"/"+name, "replicas"))
		}
		return nil
	}
	for _, d := range f.deployments {
		if out := check(d.Namespace, d.Name, d.Spec.Replicas, d.Status.Replicas, "deployments"); out != nil {
			return out
		}
	}
	for _, s := range f.statefulSets {
		if out := check(s.Namespace, s.Name, s.Spec.Replicas, s.Status.Replicas, "statefulsets"); out != nil {
			return out
		}
	}
	return nil
}

// newestEvent is the last warning about an object or what it made.
func (f *facts) newestEvent(namespace, name string) string {
	var best *corev1.Event
	for i := range f.events {
		e := &f.events[i]
		if e.Type != corev1.EventTypeWarning || cmp.Or(e.InvolvedObject.Namespace, e.Namespace) != namespace || !strings.HasPrefix(e.InvolvedObject.Name, name) {
			continue
		}
		if best == nil || eventTime(e).After(eventTime(best)) {
			best = e
		}
	}
	if best == nil {
		return ""
	}
	return best.Reason + ": " + oneLine(best.Message)
}

func judgeOOMKilled(f *facts) []finding.Finding {
	var who []string
	var evidence []finding.Evidence
	limit := ""
	for i := range f.pods {
		p := &f.pods[i]
		if ready(p) {
			continue
		}
		for _, c := range p.Status.ContainerStatuses {
			for _, t := range []*corev1.ContainerStateTerminated{c.State.Terminated, c.LastTerminationState.Terminated} {
				if t == nil || t.Reason != "OOMKilled" {
					continue
				}
				who = append(who, podKey(p)+" "+c.Name)
				evidence = append(evidence, at("pods", podKey(p), "OOMKilled, exit code "+strconv.Itoa(int(t.ExitCode))))
				f.explain(podKey(p), "model.oom_killed")
				for _, spec := range p.Spec.Containers {
					if q, ok := spec.Resources.Limits[corev1.ResourceMemory]; ok && spec.Name == c.Name {
						limit = "; its limit is " + q.String()
					}
				}
				break
			}
		}
	}
	if len(who) == 0 {
		return nil
	}
	return fail("the kernel ended "+some(3, who)+" for want of memory"+limit, "", evidence...)
}

func judgeProbeBudget(f *facts) []finding.Finding {
	if !f.had["events"] {
		return nil
	}
	for i := range f.events {
		e := &f.events[i]
		probe := ""
		switch {
		case e.Reason == "Killing" && strings.Contains(e.Message, "failed liveness probe"):
			probe = "liveness"
		case e.Reason == "Killing" && strings.Contains(e.Message, "failed startup probe"):
			probe = "startup"
		}
		if probe == "" || !f.fresh(e) {
			continue
		}
		namespace := cmp.Or(e.InvolvedObject.Namespace, e.Namespace, "default")
		p := f.podsByKey[namespace+"/"+e.InvolvedObject.Name]
		if f.had["pods"] && (p == nil || ready(p) || !isModel(p)) {
			continue
		}
		if p != nil && slices.ContainsFunc(p.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool {
			t := c.LastTerminationState.Terminated
			return t != nil && t.Reason == "OOMKilled"
		}) {
			continue
		}
		measured := "the " + probe + " probe ended the container"
		fix := ""
		started := false
		for _, t := range f.texts {
			if t.kind != "log" || t.namespace != namespace || t.pod != e.InvolvedObject.Name {
				continue
			}
			started = started || strings.Contains(t.data, "startup complete")
			if m := lastOf(shards, t.data); m != nil {
				measured += fmt.Sprintf(" while it loaded weights, %s of %s parts", m[2], m[3])
			}
		}
		if started {
			// It had come up: a hung server is another thing.
			continue
		}
		if p != nil {
			measured += fmt.Sprintf("; %d restarts, exit code 137 with the reason %s and not OOMKilled", restarts(p), lastReason(p))
			if !slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool { return c.StartupProbe != nil }) {
				fix = "Give the container a startupProbe with failureThreshold x periodSeconds of at least the time that loading takes, such as 60 x 10 s. llmbox's own chart has one: sudo llmbox install"
			}
		}
		f.explain(namespace+"/"+e.InvolvedObject.Name, "model.probe_budget")
		return fail(measured, fix, at("events", namespace+"/"+e.InvolvedObject.Name, e.Message))
	}
	return nil
}

func lastReason(p *corev1.Pod) string {
	for _, c := range p.Status.ContainerStatuses {
		if t := c.LastTerminationState.Terminated; t != nil {
			return t.Reason
		}
	}
	return "Error"
}

// judgeServiceEnv looks at what makes the collision: a Service named vllm whose
// variables every pod of its namespace gets.
func judgeServiceEnv(f *facts) []finding.Finding {
	for _, t := range f.texts {
		if t.kind != "log" && t.kind != "status" || !f.speaks(t) {
			continue
		}
		for _, hint := range []string{"appears to be a URI", "invalid literal for int() with base 10: 'tcp://"} {
			i := strings.Index(t.data, hint)
			if i < 0 {
				continue
			}
			line := lineAround(t.data, i)
			measured := "a variable of a Service stands where vLLM looks for a port"
			if m := serviceEnv.FindStringSubmatch(line); m != nil {
				measured = m[1] + "=" + m[2]
				service := strings.ToLower(strings.ReplaceAll(strings.TrimSuffix(m[1], "_PORT"), "_", "-"))
				measured += ", from the Service " + service
			}
			f.explain(t.namespace+"/"+t.pod, "model.service_env_collision")
			return fail(measured, "", t.evidence(line))
		}
	}
	for _, s := range f.services {
		if s.Name != "vllm" && !strings.HasPrefix(s.Name, "vllm-") {
			continue
		}
		for _, p := range f.models() {
			linked := p.Spec.EnableServiceLinks == nil || *p.Spec.EnableServiceLinks
			if p.Namespace != s.Namespace || !linked || ready(p) || !failing(p) || s.Name != "vllm" {
				continue
			}
			f.explain(podKey(p), "model.service_env_collision")
			return fail("the Service "+s.Namespace+"/"+s.Name+" gives "+p.Name+" the variable VLLM_PORT", "", at("services", s.Namespace+"/"+s.Name, ""))
		}
	}
	return nil
}

// judgeRollout looks for a pod that waits for a GPU while an older pod of the same
// Deployment holds it.
func judgeRollout(f *facts) []finding.Finding {
	for i := range f.pods {
		waiting := &f.pods[i]
		if wantsGPU(waiting) == 0 || !unscheduled(waiting) {
			continue
		}
		owner := deploymentOf(waiting)
		for j := range f.pods {
			old := &f.pods[j]
			if old.Namespace != waiting.Namespace || old.Name == waiting.Name || old.Spec.NodeName == "" || wantsGPU(old) == 0 || old.Status.Phase != corev1.PodRunning ||
				owner == "" || deploymentOf(old) != owner || sameSet(old, waiting) {
				continue
			}
			strategy, namespace := "", waiting.Namespace
			for _, d := range f.deployments {
				if d.Namespace == namespace && d.Name == owner {
					strategy = string(d.Spec.Strategy.Type)
				}
			}
			if strategy == "Recreate" {
				continue
			}
			f.explain(podKey(waiting), "model.rollout_deadlock")
			return fail(fmt.Sprintf("%s waits for the GPU that %s holds (%s allocatable, strategy %s)", waiting.Name, old.Name, count(int(f.allocatable()), "GPU"), cmp.Or(strategy, "RollingUpdate")),
				fmt.Sprintf(`kubectl -n %s patch deploy %s --type=merge -p '{"spec":{"strategy":{"type":"Recreate","rollingUpdate":null}}}'`, namespace, owner),
				at("pods", podKey(waiting), "Pending"), at("pods", podKey(old), "Running"))
		}
	}
	return nil
}

func unscheduled(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodPending && p.Spec.NodeName == ""
}

// deploymentOf is the Deployment that a pod comes from: the name of its ReplicaSet
// without the hash.
func deploymentOf(p *corev1.Pod) string {
	set := replicaSetOf(p)
	if i := strings.LastIndexByte(set, '-'); i > 0 {
		return set[:i]
	}
	return ""
}

func replicaSetOf(p *corev1.Pod) string {
	for _, o := range p.OwnerReferences {
		if o.Kind == "ReplicaSet" {
			return o.Name
		}
	}
	// Lists that people paste have no owners; the name says it.
	if i := strings.LastIndexByte(p.Name, '-'); i > 0 {
		return p.Name[:i]
	}
	return ""
}

func sameSet(a, b *corev1.Pod) bool { return replicaSetOf(a) == replicaSetOf(b) }

func judgeHang(f *facts) []finding.Finding {
	var m snapshot.ModelProbe
	if state, _ := f.Probe(snapshot.ProbeModel, &m); state != snapshot.Present || m.Error != "" {
		return nil
	}
	const stalled = 60
	if m.Waiting > 0 && m.Running == 0 && m.WaitedSeconds >= stalled {
		return fail(fmt.Sprintf("%.0f requests wait and none has run for %.0f s", m.Waiting, m.WaitedSeconds), "", atProbe(snapshot.ProbeModel, "requests_waiting", ""))
	}
	if m.Health >= 500 {
		return fail(fmt.Sprintf("/health says %d: the engine is dead", m.Health), "", atProbe(snapshot.ProbeModel, "health", ""))
	}
	return well(fmt.Sprintf("%.0f requests run, %.0f wait", m.Running, m.Waiting))
}

func judgeRedownload(f *facts) []finding.Finding {
	for _, p := range f.models() {
		if !persistent(p) && restarts(p) > 0 && len(p.Spec.Volumes) > 0 && !ready(p) {
			return warn(podKey(p)+" has no volume that outlives it", "", at("pods", podKey(p), "volumes"))
		}
	}
	return nil
}

// scaledBy finds the ScaledObject that says how many pods a workload has.
func (f *facts) scaledBy(namespace, name string) (unstructuredObject, bool) {
	list, _ := f.objects("scaledobjects")
	for _, o := range list {
		if o.GetNamespace() == namespace && nested(o, "spec", "scaleTargetRef", "name") == name {
			return o, true
		}
	}
	return unstructuredObject{}, false
}

// scalesToNothing says whether a ScaledObject may leave no replica: it does where no
// least number is named.
func scalesToNothing(o unstructuredObject) bool {
	least := nested(o, "spec", "minReplicaCount")
	return least == "" || least == "0" || nested(o, "spec", "idleReplicaCount") == "0"
}

func judgeScalesToZero(f *facts) []finding.Finding {
	list, had := f.objects("scaledobjects")
	if !had {
		return nil
	}
	for _, o := range list {
		fallback := nested(o, "spec", "fallback")
		if nested(o, "spec", "minReplicaCount") == "0" && fallback == "" && nested(o, "spec", "scaleTargetRef", "name") == "model-server" {
			return note(fullName(o)+" may scale the model to nothing when its figures are missing", at("scaledobjects", fullName(o), "minReplicaCount: 0"))
		}
	}
	return nil
}

// lowGeneration also tells of a GPU that is older than llmbox supports, where only the
// model's log knows.
func lowGeneration(f *facts) []finding.Finding {
	for _, t := range f.texts {
		i := strings.Index(t.data, "oat16 is only supported on GPUs")
		if i < 0 || !f.speaks(t) {
			continue
		}
		line := lineAround(t.data, i)
		m := bf16.FindStringSubmatch(line)
		all := capability.FindAllStringSubmatch(line, -1)
		if m == nil || len(all) == 0 {
			continue
		}
		have := all[len(all)-1][1]
		return []finding.Finding{{
			ID: "preflight.gpu_generation", Severity: finding.Fail, Title: "GPU generation", Required: "compute capability 8.0 or newer (Ampere)",
			Measured: m[2] + " has " + strings.TrimSuffix(have, "."), Fix: "Take a machine with an Ampere GPU or newer: " + products(), Evidence: []finding.Evidence{t.evidence(line)},
			Source: "vllm-project/vllm#1153, #1157",
		}}
	}
	return nil
}

// products names a few GPUs that serve.
func products() string {
	var out []string
	for _, p := range gpu.Products() {
		if p.ComputeMajor >= 8 {
			out = append(out, p.Name)
		}
	}
	return some(4, out)
}
