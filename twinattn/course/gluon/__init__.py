"""Run kernels in Gluon on a CPU, in an order that is drawn: warpgroups take turns wherever one may wait for another.

Triton's interpreter does not run Gluon. This one runs what the kernels for Hopper use of it: warpgroups with roles,
shared memory, barriers in it (`mbarrier`) and named ones, copies of whole tiles (TMA) and by thread (`cp.async`), and
asynchronous products. A warpgroup is a thread here, and one runs at a time. What is asynchronous is done at a drawn
time: at once, some time later, or when a warpgroup waits for it. So a wait too few is a wrong number in some order, and
a barrier of a wrong count is a deadlock, which is an error that says who waits where. Further errors:

    an address outside of the memory of its tensor
    a product whose numbers are read before it is waited for
    a product over shared memory that was written by threads, without a fence after it (`fence_async_shared`)
    an arrival at a barrier that expects no more, and a wait for a parity that is neither 0 nor 1
    warpgroups that expect different numbers of threads at a named barrier
    a copy under way, or a product that was not waited for, when its warpgroup ends

Memory is NaN until it is written. Not found:

    what the compiler checks: layouts, registers, and types that change in a loop
    an arrival that one warp makes before the others have read: the warps of a warpgroup are always in step
    two programs that read and write the same memory at once: they take turns at barriers alone
    a tile that TMA writes over what threads have just read or written, without a fence between
    a loop that neither ends nor waits: it runs until it is interrupted

    interpret    kernels and what they call, as Python functions; launches; our kernels for Hopper on a CPU
    machine      warpgroups, and the order in which they run
    memory       shared memory and barriers
    transfers    copies and products
    values       tensors, scalars and addresses, and the functions of `gl` and `tl`

    from twinattn.course.gluon.interpret import Interpreted

    Interpreted(kernel, seed=3)[grid](*arguments, num_warps=4)

Source: the PTX manual, "mbarrier", "bar", "cp.async", "wgmma" and "async proxy".
"""
