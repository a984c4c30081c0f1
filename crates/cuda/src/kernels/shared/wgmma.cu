// Instructions of compute capability 9.0 alone: products of four warps (wgmma), and copies that signal a barrier when
// they are done.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

DEVICE void wide_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wide_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING groups are in flight. The sums pass through, so that nothing reads them before.
template <int PENDING, int LEN>
DEVICE void wide_wait(float (&d)[LEN]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
    for (int i = 0; i < LEN; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Rows of 128 bytes whose pieces of 16 bytes are permuted (the 128-byte swizzle); eight rows are 1024 bytes.
DEVICE u64 panel_descriptor(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

DEVICE void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

// A copy of data that is read once: evicted first from the L2 cache.
DEVICE void copy_bulk_once(u32 to, const void* from, u32 bytes, u32 barrier) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}

// Registers move from the warps that copy to those that multiply.
template <int COUNT>
DEVICE void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
DEVICE void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// A stage in a ring of STAGES, and the parity of the rounds through it.
template <int STAGES>
struct Ring {
    u32 stage, round;
    DEVICE Ring start() { return Ring{0, 0}; }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            round ^= 1;
        }
    }
};

#endif
