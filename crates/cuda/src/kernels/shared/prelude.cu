// Put before every kernel file: number types, conversions, reductions in a fixed order, tensor-core instructions,
// operands.
//
// No header is included, so that the same text compiles with nvcc and with NVRTC. Products and sums that two kernels
// must round alike are written with __fmul_rn, __fadd_rn and __fmaf_rn: the compiler may fuse plain ones, and
// differently in each kernel.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__

static const u32 FULL_WARP = 0xffffffffu;

DEVICE float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

DEVICE u16 float_to_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

DEVICE float bf16_to_float(u16 b) { return __uint_as_float((u32)b << 16); }

DEVICE u16 float_to_bf16(float f) {
    u16 b;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b) : "f"(f));
    return b;
}

// Two halves at once, each operation rounded on its own.
DEVICE u32 half2_add(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

DEVICE u32 half2_mul(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// a & mask | bits in one instruction, which the compiler makes of it only when `bits` is in a register.
template <u32 MASK>
DEVICE u32 masked_or(u32 a, u32 bits) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "n"(MASK), "r"(bits));
    return d;
}

// A constant that the compiler keeps in a register.
template <u32 VALUE>
DEVICE u32 in_register() {
    u32 d;
    asm("mov.u32 %0, %1;" : "=r"(d) : "n"(VALUE));
    return d;
}

DEVICE u32 half2_fma(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Loads 16 bytes of weights, which are read once and need not be in the L1 cache.
DEVICE uint4 load_streaming(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// An integer that orders as the float does; both zeros are equal.
DEVICE u32 ordered(float x) {
    u32 bits = __float_as_uint(x == 0.0f ? 0.0f : x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

DEVICE float unordered(u32 number) { return __uint_as_float(number >> 31 ? number & 0x7fffffffu : ~number); }

DEVICE float warp_sum(float x) {
    for (int i = 16; i > 0; i /= 2) x = __fadd_rn(x, __shfl_xor_sync(FULL_WARP, x, i));
    return x;
}

DEVICE float warp_max(float x) {
    for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, i));
    return x;
}

// The sum over a block of at most 32 whole warps; every thread gets the result. The order depends on the block's size
// alone.
DEVICE float block_sum(float x) {
    __shared__ float parts[32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    x = lane < (int)(blockDim.x / 32) ? parts[lane] : 0.0f;
    return warp_sum(x);
}

// The maximum of values that are not negative. `magnitude` makes a NaN infinity, so that it does not vanish in the
// comparison.
DEVICE float block_max(float x) {
    __shared__ float parts[32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    x = lane < (int)(blockDim.x / 32) ? parts[lane] : 0.0f;
    return warp_max(x);
}

DEVICE float magnitude(float x) { return x == x ? fabsf(x) : __int_as_float(0x7f800000); }

// d += a b: a is 16 x 16 (rows by depth), b is 16 x 8, in the tensor core's fragment layout. Each element of d depends
// on its own row of a and column of b alone, whatever the others hold: this is why one row and many agree to the bit.
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads four 8 x 8 matrices of 16-bit values from shared memory; lane i has the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices(u32 (&m)[4], u32 shared_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address));
}

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copies 16 bytes from global to shared memory asynchronously; zeros if `valid` is false.
DEVICE void copy_async(u32 to, const void* from, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A kernel may be launched while the one before it still runs (programmatic dependent launch). `begin`, at the top of
// every kernel, lets the next one start early and waits until everything before this one is written. Before its wait a
// kernel may read nothing but weights.
DEVICE void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void begin() {
    let_next_start();
    wait_for_previous();
}

// The operand of a matrix product made from rows of f32: `pitch` 16-bit values a row, zeros from `cols` on.
//
// It lies in panels of 128 rows by 64 columns, 16 KiB each, the panels of the same rows one after the other. Within a
// panel a row is 128 bytes, and its eight pieces of 16 bytes are permuted by the row's number: copied to shared memory
// as it is, by one copy, tensor cores read it without a bank conflict.
//
// For bf16 weights it is bf16. For f16 and quantized weights it is f16, each row times a power of two that brings its
// largest value near 2^14, so that no activation leaves the range of f16; `scales` holds the inverse factors, for the
// product.
struct Operand {
    u16* numbers;
    float* scales;
    // [rows][MAX_PIECES]: the largest magnitude in each piece of a row, where pieces are written by different blocks.
    float* maxima;
    u32 pitch;
    u32 is_bf16;
};

// Values of a row that a block takes if a row is distributed over blocks, and the maximum number of such pieces.
static const u32 PIECE = 1024;
static const u32 MAX_PIECES = 64;

static const u32 PANEL_ROWS = 128;

// Offset of a value of the operand.
DEVICE u64 operand_place(u32 row, u32 col, u32 pitch) {
    u64 panel = (u64)(row / PANEL_ROWS) * (pitch / 64) + col / 64;
    return (panel * PANEL_ROWS + row % PANEL_ROWS) * 64 + ((col / 8 ^ row) % 8) * 8 + col % 8;
}

// The exponent of a row's factor, biased as in a float, from its largest magnitude.
DEVICE u32 forward_exponent(float largest) {
    u32 exponent = __float_as_uint(largest) >> 23;
    // Rows with an infinity or a NaN, and rows of zeros, have the factor 1.
    return exponent == 255 || largest == 0.0f ? 127 : min(253u, 268 - exponent);
}

DEVICE float power(u32 biased_exponent) { return __uint_as_float(biased_exponent << 23); }

// Values of a row that a thread holds in registers: thread t holds t, t + blockDim, ... Rows of up to 4,096 values are
// held whole by 1,024 threads; values beyond are read again.
static const int HELD = 4;

// Writes one row of the operand; a whole block does it. `held[k]` is value threadIdx.x + k * blockDim.x; beyond HELD of
// them, `value(i)` gives value i, the same each time it is called.
template <class Value>
DEVICE void write_operand(const Operand& operand, u32 row, u32 cols, const float (&held)[HELD], Value value) {
    u32 rest = threadIdx.x + HELD * blockDim.x;
    float factor = 1.0f;
    if (!operand.is_bf16) {
        float largest = 0.0f;
#pragma unroll
        for (int k = 0; k < HELD; k++)
            if (threadIdx.x + k * blockDim.x < cols) largest = fmaxf(largest, magnitude(held[k]));
        for (u32 i = rest; i < cols; i += blockDim.x) largest = fmaxf(largest, magnitude(value(i)));
        largest = block_max(largest);
        u32 forward = forward_exponent(largest);
        factor = power(forward);
        if (threadIdx.x == 0) operand.scales[row] = power(254 - forward);
    } else if (threadIdx.x == 0) {
        operand.scales[row] = 1.0f;
    }
    auto put = [&](u32 i, float x) {
        operand.numbers[operand_place(row, i, operand.pitch)] =
            operand.is_bf16 ? float_to_bf16(x) : float_to_half(__fmul_rn(x, factor));
    };
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        u32 i = threadIdx.x + k * blockDim.x;
        if (i < cols) put(i, held[k]);
    }
    for (u32 i = rest; i < cols; i += blockDim.x) put(i, value(i));
    for (u32 i = cols + threadIdx.x; i < operand.pitch; i += blockDim.x)
        operand.numbers[operand_place(row, i, operand.pitch)] = 0;
}

// Rotates a pair of values by an angle.
DEVICE void rotate(float& a, float& b, float cosine, float sine) {
    float first = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
    b = __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine));
    a = first;
}
