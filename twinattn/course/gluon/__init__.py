"""Run kernels in Gluon on a CPU, in an order that is drawn: warpgroups take turns wherever one may wait for another.

Triton's interpreter does not run Gluon. This one runs what the kernels for Hopper use of it: warpgroups with roles,
shared memory, barriers in it (`mbarrier`) and named ones, copies of whole tiles (TMA) and by thread (`cp.async`), and
asynchronous products. A warpgroup is a thread here, and one runs at a time. What is asynchronous is done at a drawn
time: at once, some time later, or when a warpgroup waits for it. So a wait too few is a wrong number in some order,
and a barrier of a wrong count is a deadlock, which is an error that says who waits where. Further errors:

    an address outside of the memory of its tensor
    a product whose numbers are read before it is waited for
    a product over shared memory that was written by threads, without a fence after it (`fence_async_shared`)
    an arrival at a barrier that expects no more
    a copy or product under way when its warpgroup ends

Memory is NaN until it is written. Layouts are not checked, which the compiler does, and the warps of a warpgroup
are always in step: an arrival that one warp makes before the others have read is not found.

    interpret    kernels and what they call, as Python functions; launches; our kernels for Hopper on a CPU
    machine      warpgroups, and the order in which they run
    memory       shared memory and barriers
    transfers    copies and products
    values       tensors, scalars and addresses, and the functions of `gl` and `tl`

    from twinattn.course.gluon.interpret import Interpreted

    Interpreted(kernel, seed=3)[grid](*arguments, num_warps=4)

Source: the PTX manual, "mbarrier", "bar", "cp.async", "wgmma" and "async proxy".
"""
