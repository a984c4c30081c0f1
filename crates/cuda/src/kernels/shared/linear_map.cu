// Shared by the kernels of linear maps: their parameter, the slices of the columns, and how results are written.

enum Activation { SILU = 0, GELU = 1, GELU_TANH = 2, CLAMPED_SWIGLU = 3 };

// Of every activation but CLAMPED_SWIGLU, which needs the other factor too.
DEVICE float activated(u32 activation, float x) {
    if (activation == SILU) return __fdiv_rn(x, __fadd_rn(1.0f, expf(-x)));
    if (activation == GELU) {
        // Phi(x) through the complement: 1 + erf would cancel for negative x.
        return __fmul_rn(__fmul_rn(0.5f, x), erfcf(__fmul_rn(x, -0.70710678118654752f)));
    }
    float cube = __fmul_rn(__fmul_rn(x, x), x);
    float inner = __fmul_rn(0.79788456080286536f, __fmaf_rn(0.044715f, cube, x));
    // 0.5 (1 + tanh u) = 1 / (1 + exp(-2u)), which does not cancel either.
    return __fdiv_rn(x, __fadd_rn(1.0f, expf(__fmul_rn(-2.0f, inner))));
}

// Not inlined: most models have SILU, and code has to be loaded from memory too.
static __device__ __noinline__ float gated_apart(u32 activation, float gate, float up) {
    if (activation != CLAMPED_SWIGLU) return __fmul_rn(activated(activation, gate), up);
    // gate sigmoid(1.702 gate) (up + 1), with gate at most 7 and up from -7 to 7. A NaN passes the comparisons.
    if (gate > 7.0f) gate = 7.0f;
    if (up > 7.0f) up = 7.0f;
    if (up < -7.0f) up = -7.0f;
    return __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, expf(__fmul_rn(-1.702f, gate)))), __fadd_rn(up, 1.0f));
}

DEVICE float gated(u32 activation, float gate, float up) {
    return activation == SILU ? __fmul_rn(activated(SILU, gate), up) : gated_apart(activation, gate, up);
}

struct LinearPart {
    const u8* weight;
    const float* bias;
    float* out;
    u32 outputs;
    u32 first_tile;  // index of the first tile of this part among the tiles of all parts
};

static const int MAX_PARTS = 3;

// How `stream` (few_rows_ring.cu) distributes a product.
struct StreamPlan {
    u32 spread;  // warps that share the slices of a tile: all slices a warp each, or one warp for all
    u32 early;   // chunks that every warp loads before x
    // The first blocks have the tiles of one format, the others those of a second format, from `second_tile` on.
    u32 format, second_format;
    u32 first_blocks, second_tile;
};

// Up to three matrices of one format (in `stream`, of two) with the same input: for queries, keys and values, or for
// gate and up.
struct Linear {
    Operand x;
    u32 num_rows, cols;
    u32 slices;
    u32 num_parts, num_tiles;
    LinearPart parts[MAX_PARTS];
    float* workspace;      // [slices][rows][outputs of all tiles], if the slices are given to blocks
    const float* x_plain;  // [rows][cols], for weights of f32, and for kernels of few rows that make the operand
    // Operations that kernels of few rows do besides, to save launches.
    const float* norm_weight;  // if not null, the operand is that of the RMSNorm of x, which is written to `normed`
    float* normed;
    float* residual;           // if not null, the result is added to this too
    u32* maxima;               // for each row, the largest magnitude of activation(gate) * up, as bits
    float eps;
    u32 maxima_are;            // 1: known, 2: to be found, 3: to be cleared
    u32 makes_operand;
    u32 is_gated;              // two parts, gate and up: the first becomes activation(gate) * up
    u32 activation;
    StreamPlan plan;
    Operand result;            // of many_rows_wgmma.cu when gated: the operand of activation(gate) * up
};

// Groups of 256 columns.
DEVICE u32 num_groups(u32 cols) { return (cols + 255) / 256; }

// The logarithm of a power of two.
DEVICE u32 logarithm(u32 x) { return 31 - __clz(x); }

// There are 1, 2, 4 or 8 slices.
DEVICE u32 slice_start(u32 cols, u32 slices, u32 slice) { return slice * num_groups(cols) >> logarithm(slices); }

DEVICE const LinearPart& part_of(const Linear& p, u32 tile) {
    if (p.num_parts > 2 && tile >= p.parts[2].first_tile) return p.parts[2];
    if (p.num_parts > 1 && tile >= p.parts[1].first_tile) return p.parts[1];
    return p.parts[0];
}

DEVICE float finished(float total, float scale, const float* bias, u32 o) {
    total = __fmul_rn(total, scale);
    return bias ? __fadd_rn(total, bias[o]) : total;
}

// Address of the chunk of a tile that holds the first unit of a group.
template <class W>
DEVICE const u8* group_weights(const u8* weight, u32 tile, u32 group, u32 cols) {
    return weight + chunk_index(tile, group * (4 / W::CHUNK_UNITS),
        num_groups(cols) * (4 / W::CHUNK_UNITS)) * W::CHUNK_BYTES;
}

// Bytes from a group of a tile to the next.
template <class W>
DEVICE u32 group_stride() {
    return 4 / W::CHUNK_UNITS * SIDE * W::CHUNK_BYTES;
}

// Values of a row in the workspace.
DEVICE u32 slice_width(const Linear& p) { return p.num_tiles * 16; }

DEVICE float* slice_sums(const Linear& p, u32 slice) { return p.workspace + (u64)slice * p.num_rows * slice_width(p); }

// Writes four adjacent outputs of a row, of one tile.
DEVICE void write_four(const Linear& p, u32 row, u32 tile, u32 within, const float4& total, float scale) {
    if (tile >= p.num_tiles) return;
    const LinearPart& part = part_of(p, tile);
    u32 output = (tile - part.first_tile) * 16 + within;
    if (output >= part.outputs) return;
    float* out = part.out + (u64)row * part.outputs + output;
    const float* bias = part.bias;
    if (part.outputs % 4 == 0) {
        *(float4*)out = make_float4(finished(total.x, scale, bias, output), finished(total.y, scale, bias, output + 1),
                                    finished(total.z, scale, bias, output + 2), finished(total.w, scale, bias,
                                        output + 3));
        return;
    }
    const float numbers[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        if (output + i < part.outputs) out[i] = finished(numbers[i], scale, bias, output + i);
}

// A product of one matrix whose slices are added up by the kernel that reads it.
struct SliceSums {
    const float* sums;  // [slices][rows][pitch]; null when there are none
    const float* scales;
    const float* bias;
    u64 stride;         // values from a slice to the next
    u32 pitch, count;
};

// Maximum number of slices.
static const u32 MAX_SLICES = 8;

DEVICE float added_up(const SliceSums& p, u32 row, u32 i) {
    const float* from = p.sums + (u64)row * p.pitch + i;
    float sums[MAX_SLICES];
#pragma unroll
    for (u32 s = 0; s < MAX_SLICES; s++)
        if (s < p.count) sums[s] = from[s * p.stride];
#pragma unroll
    for (u32 s = 1; s < MAX_SLICES; s++)
        if (s < p.count) sums[0] = __fadd_rn(sums[0], sums[s]);
    return finished(sums[0], p.scales[row], p.bias, i);
}
