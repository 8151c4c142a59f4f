"""What people do with the two twins: prove a kernel, serve a model, measure, learn.

    kit             proves any attention kernel
    engine          continuous batching over either twin; CUDA graphs, fused layers, an HTTP server, the demo
    bench           measures every path beside other libraries
    libraries       one caller for each of these libraries, for the kit and the benchmark
    integrations    transformers, vLLM, FlashAttention's functions, torch.compile
    course          exercises, puzzles and drawings, which the notebooks and the site use
    cli             the command `twinattn`

`refattn` and `fastattn` import nothing of it.
"""
