// What every kernel file begins with: number types, conversions, reductions in a fixed order, and the tensor-core instruction.
//
// No header is included, so that the same text compiles with nvcc and with NVRTC. Products and sums that two kernels must round
// alike are written with __fmul_rn, __fadd_rn and __fmaf_rn: the compiler may fuse plain ones, and differently in each kernel.

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

// Weights are read once and pass through: 16 bytes that are not worth a place in the first cache.
DEVICE uint4 load_streaming(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// A number that orders as the float does, both zeros being one.
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

// Over a block of whole warps, at most 32; every thread gets the result. The tree depends on the block's size alone.
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

// Of numbers that are not negative. A NaN counts as infinity: it must not vanish in the comparison.
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

// d += a b: a is 16 x 16 (rows by depth), b is 16 x 8, in the tensor core's fragment layout. Each element of d depends on its own
// row of a and column of b alone, whatever stands in the others: this is what makes one row and many agree to the bit.
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit numbers from shared memory; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrices(u32 (&m)[4], u32 shared_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address));
}

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes from global to shared memory in the background; zeros when `valid` is false.
DEVICE void copy_async(u32 to, const void* from, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A kernel may be launched while the one before it still runs (programmatic dependent launch). `begin` stands at the top of every
// kernel: it lets the next one start early and waits until everything before this one is written. What a kernel does before its
// wait may touch nothing but weights.
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

// The operand of a matrix product made from rows of f32: `pitch` 16-bit numbers a row, zeros from `cols` on.
//
// It lies in panels of 128 rows by 64 columns, 16 KiB each, the panels of the same rows one after the other. Within a panel a row is 128
// bytes, and its eight pieces of 16 bytes change places by the row's number: as it stands in memory, so tensor cores read it from shared
// memory without a bank conflict, and one copy brings a panel there.
//
// For bf16 weights it is bf16. For f16 and quantized weights it is f16, each row times a power of two that brings its largest number
// near 2^14, so that no model's activations leave the range of f16; `scales` holds the factor that takes the product back.
struct Operand {
    u16* numbers;
    float* scales;
    float* maxima;  // [rows][MAX_PIECES]: the largest magnitude in each piece of a row, where pieces are written by different blocks
    u32 pitch;
    u32 is_bf16;
};

// Numbers of a row that a block takes when a row is shared out, and the most such pieces.
static const u32 PIECE = 1024;
static const u32 MAX_PIECES = 64;

static const u32 PANEL_ROWS = 128;

// Where a number of the operand lies.
DEVICE u64 operand_place(u32 row, u32 col, u32 pitch) {
    u64 panel = (u64)(row / PANEL_ROWS) * (pitch / 64) + col / 64;
    return (panel * PANEL_ROWS + row % PANEL_ROWS) * 64 + ((col / 8 ^ row) % 8) * 8 + col % 8;
}

// The exponent of a row's factor, biased as in a float, by its largest magnitude.
DEVICE u32 forward_exponent(float largest) {
    u32 exponent = __float_as_uint(largest) >> 23;
    // Infinities and NaN stay what they are; zeros need no factor.
    return exponent == 255 || largest == 0.0f ? 127 : min(253u, 268 - exponent);
}

DEVICE float power(u32 biased_exponent) { return __uint_as_float(biased_exponent << 23); }

// The first numbers of a row in registers: thread t holds t, t + blockDim, ... A block has one multiprocessor to itself at best, and every
// instruction counts: rows of up to 4096 are held whole, what goes beyond is read again.
static const int HELD = 4;

// Writes one row of the operand; a whole block does it. `held[k]` is number threadIdx.x + k * blockDim.x; beyond HELD of them, `value(i)`
// gives number i, and must give the same each time it is asked.
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
        operand.numbers[operand_place(row, i, operand.pitch)] = operand.is_bf16 ? float_to_bf16(x) : float_to_half(__fmul_rn(x, factor));
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

// The two numbers of a pair, turned by an angle.
DEVICE void turn(float& a, float& b, float cosine, float sine) {
    float first = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
    b = __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine));
    a = first;
}
