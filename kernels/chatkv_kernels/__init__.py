"""The arithmetic of a turn, twice: as plain torch, and as Triton kernels that must agree with it.

A function of this package is written in a module of its own name, in plain torch: that is what it
means, the reference of its kernel, and what runs on a CPU. Decorated with `has_kernel`, it has a
twin of the same name and signature in `chatkv_kernels.gpu`, in a module of the same name, which
takes over where the tensors are on a GPU:

    from chatkv_kernels.paged_decode import paged_decode

    paged_decode(query, ...)            the reference on a CPU, the kernel on a GPU
    paged_decode.reference(query, ...)  plain torch, wherever the tensors are
    paged_decode.kernel(query, ...)     the kernel (on a CPU: in Triton's interpreter)

Nothing outside `gpu` imports Triton: a CPU needs none, and the first kernel loads it.

The pool of KV is [num_blocks, num_layers, 2 (keys, values), num_kv_heads, block_tokens, head_dim].
A block of all layers is then one stretch of memory, which a plain copy moves between devices, any
run of its layers is one too, and what a kernel reads at once, one head's keys or values of a block,
lies in one piece. Kernels see views of it and follow their strides. A *slot* is a token's place in
it: block * block_tokens + place in the block.
"""
