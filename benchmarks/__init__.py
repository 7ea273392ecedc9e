"""Benchmarks, each a module. ``lightning bench NAME`` prints a table and writes JSON with the machine and the versions."""

BENCHMARKS = {
    "architectures": "VLT and DiG: time of a step for each kind of attention and each size of image.",
    "attention": "The operator: time of each form, compared with softmax, linear attention, a loop over blocks, and its floor.",
    "compilation": "Effect of compile: true on the shipped CPU configurations: graphs, losses, time of a step.",
    "forms": "Faster form of the operator for each shape, and whether form=auto chooses it.",
    "generation": "Time per token and memory of the state, by the length of the context.",
    "gpu": "All programs that need a GPU: checks, forms, the operator and its peers, full models; resumable.",
    "graphs": "Swapped models: graph breaks, number of graphs at two sizes, time of a step.",
    "kills": "A run that is killed repeatedly at random times, and the same run left undisturbed.",
    "linearize": "Memory of linearizing a Llama of 1B parameters.",
    "loss_identity": "First losses of every shipped CPU configuration, compared to the last bit.",
    "models": "Diffusion transformers: time and memory of a training step, by kind of attention and size of image.",
    "native": "Checks of the operator on this device: real tiles, streams, graphs, large tensors.",
    "real_encoders": "A linearized encoder of texts or images against its original: agreement and time by length.",
    "real_language": "A pretrained language model with its attention replaced: window, sinks and MHLA at equal training.",
    "real_photos": "Squares of photographs that desktops ship, to linearize image encoders with.",
    "real_texts": "Documentation of Python, Debian and Git as texts to linearize pretrained models with.",
    "recurrences": "Recurrences of the baselines, compared with references in PyTorch: error and time on a CPU.",
    "resources": "Registers, spills and shared memory of the Triton kernels, compiled ahead of time without a GPU.",
    "sana": "SANA-0.6B and 1.6B: parameters, operations, memory of a training step, times on a GPU.",
    "sequence": "Bytes that sequence parallelism moves for each layer, compared with ring attention.",
    "short_blocks": "Time of exponential mixing by block size, compared with linear attention.",
    "streaming": "Samples per second from shards on a server, and from the same shards on a local disk.",
    "throughput": "Training steps of the shipped configurations on this device: samples per second and MFU.",
    "wan": "Wan2.1-1.3B: parameters, operations, memory of a training step, times on a GPU.",
}
"""Summaries of the benchmarks by module name. Each module has a function ``main``, which ``python -m benchmarks`` runs."""
