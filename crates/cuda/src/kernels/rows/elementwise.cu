// Operations on each row, or on each value of it: embedding, gathering, residual sums, caps, activations, rotations,
// operands of products. Rows are [rows][cols] in f32. Bytes moved: each value read and written once. Bound: latency,
// with few rows; memory bandwidth, with many.

struct Embed {
    const u8* table;  // rows as they lie in the file
    const u32* ids;
    const u32* assumed;  // token of each digest of the step before
    float* out;
    u64 row_bytes;
    u32 num_rows, cols, table_rows;
    u32 format;
    float scale;
};

static const u32 ASSUMED = 0x80000000u;

// out[r] = scale * table[ids[r]], where an id ASSUMED + i is the token of digest i of the step before; blockIdx: x =
// row, y = columns.
KERNEL void embed(Embed e) {
    begin();
    u32 row = blockIdx.x;
    u32 id = e.ids[row];
    if (id & ASSUMED) id = e.assumed[id - ASSUMED];
#pragma unroll 1
    for (u32 col = blockIdx.y * blockDim.x + threadIdx.x; col < e.cols; col += gridDim.y * blockDim.x) {
        // An id beyond the table is a mistake of the caller; it must not read beyond the table.
        float value = id < e.table_rows ? stored_number(e.format, e.table + id * e.row_bytes,
            col) : __int_as_float(0x7fc00000);
        e.out[(u64)row * e.cols + col] = __fmul_rn(value, e.scale);
    }
}

struct MovedRows {
    const float* x;
    const u32* rows;
    float* out;
    u32 cols;
};

// out[r] = x[rows[r]]
KERNEL void gather_rows(MovedRows m) {
    begin();
    const float* from = m.x + (u64)m.rows[blockIdx.x] * m.cols;
    float* to = m.out + (u64)blockIdx.x * m.cols;
    for (u32 i = threadIdx.x; i < m.cols; i += blockDim.x) to[i] = from[i];
}

// out[rows[r]] = x[r]
KERNEL void scatter_rows(MovedRows m) {
    begin();
    const float* from = m.x + (u64)blockIdx.x * m.cols;
    float* to = m.out + (u64)m.rows[blockIdx.x] * m.cols;
    for (u32 i = threadIdx.x; i < m.cols; i += blockDim.x) to[i] = from[i];
}

struct Elementwise {
    float* x;
    const float* y;
    u64 len;
    float cap;
    u32 activation;
};

KERNEL void add(Elementwise e) {
    begin();
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < e.len; i += (u64)gridDim.x * blockDim.x)
        e.x[i] = __fadd_rn(e.x[i], e.y[i]);
}

// x = 0
KERNEL void clear(Elementwise e) {
    begin();
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < e.len; i += (u64)gridDim.x * blockDim.x) e.x[i] = 0.0f;
}

KERNEL void soft_cap(Elementwise e) {
    begin();
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < e.len; i += (u64)gridDim.x * blockDim.x)
        e.x[i] = __fmul_rn(e.cap, tanhf(__fdiv_rn(e.x[i], e.cap)));
}

// x *= cap
KERNEL void scale(Elementwise e) {
    begin();
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < e.len; i += (u64)gridDim.x * blockDim.x)
        e.x[i] = __fmul_rn(e.x[i], e.cap);
}

// Squared ReLU, which no product computes in its epilogue; the other activations follow `Activation`.
static const u32 SQUARED_RELU = 4;

// max(x, 0)^2; a NaN passes the comparison.
DEVICE float squared_relu(float x) { return x < 0.0f ? 0.0f : __fmul_rn(x, x); }

DEVICE float activated_of_all(u32 activation, float x) {
    return activation == SQUARED_RELU ? squared_relu(x) : activated(activation, x);
}

DEVICE float gated_of_all(u32 activation, float gate, float up) {
    return activation == SQUARED_RELU ? __fmul_rn(squared_relu(gate), up) : gated(activation, gate, up);
}

KERNEL void activate(Elementwise e) {
    begin();
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < e.len; i += (u64)gridDim.x * blockDim.x)
        e.x[i] = activated_of_all(e.activation, e.x[i]);
}

// x = activation(x) * y
KERNEL void gate(Elementwise e) {
    begin();
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < e.len; i += (u64)gridDim.x * blockDim.x)
        e.x[i] = gated_of_all(e.activation, e.x[i], e.y[i]);
}

// x = y rounded to bf16
KERNEL void round_rows(Elementwise e) {
    begin();
    u16* to = (u16*)e.x;
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < e.len / 4; i += stride) {
        float4 v = ((const float4*)e.y)[i];
        u32 low = (u32)float_to_bf16(v.y) << 16 | float_to_bf16(v.x),
            high = (u32)float_to_bf16(v.w) << 16 | float_to_bf16(v.z);
        ((uint2*)to)[i] = make_uint2(low, high);
    }
    u64 rest = e.len / 4 * 4 + threadIdx.x;
    if (blockIdx.x == 0 && rest < e.len) to[rest] = float_to_bf16(e.y[rest]);
}

struct GateByColumns {
    float* x;         // [rows][cols]
    const float* by;  // [rows][pitch], of which `gate_columns` reads `cols` columns
    u64 len;          // of x
    u32 cols, pitch;
    u32 activation;
};

// x = activation(x) * by, of the first columns of `by`
KERNEL void gate_columns(GateByColumns g) {
    begin();
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < g.len; i += (u64)gridDim.x * blockDim.x)
        g.x[i] = gated_of_all(g.activation, g.x[i], g.by[i / g.cols * g.pitch + i % g.cols]);
}

// x *= sigmoid(by); a gate of one column (`pitch`) applies to the whole row.
KERNEL void sigmoid_gate(GateByColumns g) {
    begin();
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < g.len; i += (u64)gridDim.x * blockDim.x) {
        float by = g.by[g.pitch == 1 ? i / g.cols : i];
        g.x[i] = __fmul_rn(g.x[i], __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-by))));
    }
}

struct HeadRows {
    u32* heads;
    u32 num_pairs, num_heads;
};

// The head of each pair (row, head).
KERNEL void heads_of_rows(HeadRows h) {
    begin();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < h.num_pairs) h.heads[i] = i % h.num_heads;
}

struct JoinHeads {
    const float* parts[2];  // [rows][heads * cols]
    float* out;             // [rows][heads * (cols of both)]
    u64 len;                // of out
    u32 cols[2];
};

// out = the parts of each head, one after the other
KERNEL void join_heads(JoinHeads j) {
    begin();
    u32 width = j.cols[0] + j.cols[1];
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < j.len; i += (u64)gridDim.x * blockDim.x) {
        u64 head = i / width;
        u32 col = i % width;
        bool is_first = col < j.cols[0];
        if (!is_first) col -= j.cols[0];
        j.out[i] = is_first ? j.parts[0][head * j.cols[0] + col] : j.parts[1][head * j.cols[1] + col];
    }
}

struct GateRows {
    float* x;
    const float* y;
    u32 cols;
    u32 activation;
    Operand operand;
};

// x = activation(x) * y, and the input of the next product: the operand itself for bf16, else the largest magnitude of
// each piece. blockIdx: x = piece, y = row.
KERNEL void __launch_bounds__(256) gate_with_operand(GateRows g) {
    begin();
    u32 row = blockIdx.y;
    float* x = g.x + (u64)row * g.cols;
    const float* y = g.y + (u64)row * g.cols;
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 i = blockIdx.x * PIECE + k * 256 + threadIdx.x;
        float value = 0.0f;
        if (i < g.cols) {
            value = gated_of_all(g.activation, x[i], y[i]);
            x[i] = value;
        }
        if (g.operand.is_bf16 && i < g.operand.pitch)
            g.operand.numbers[operand_place(row, i, g.operand.pitch)] = float_to_bf16(value);
        largest = fmaxf(largest, magnitude(value));
    }
    if (g.operand.is_bf16) {
        if (threadIdx.x == 0 && blockIdx.x == 0) g.operand.scales[row] = 1.0f;
        return;
    }
    largest = block_max(largest);
    if (threadIdx.x == 0) g.operand.maxima[row * MAX_PIECES + blockIdx.x] = largest;
}

struct OperandRows {
    const float* x;
    u32 cols;
    Operand operand;
};

// The operand of a matrix product from rows of f32; a block for each row.
KERNEL void __launch_bounds__(1024, 1) make_operand(OperandRows o) {
    begin();
    const float* x = o.x + (u64)blockIdx.x * o.cols;
    float held[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        u32 i = threadIdx.x + k * blockDim.x;
        held[k] = i < o.cols ? x[i] : 0.0f;
    }
    write_operand(o.operand, blockIdx.x, o.cols, held, [&](u32 i) { return x[i]; });
}

// The operand in f16, when the largest magnitudes of the pieces are known; blockIdx: x = piece, y = row.
KERNEL void __launch_bounds__(256) make_scaled_operand(OperandRows o) {
    begin();
    u32 row = blockIdx.y, pieces = (o.cols + PIECE - 1) / PIECE, lane = threadIdx.x % 32;
    const float* maxima = o.operand.maxima + row * MAX_PIECES;
    float largest = lane < pieces ? maxima[lane] : 0.0f;
    if (lane + 32 < pieces) largest = fmaxf(largest, maxima[lane + 32]);
    u32 forward = forward_exponent(warp_max(largest));
    const float* x = o.x + (u64)row * o.cols;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 i = blockIdx.x * PIECE + k * 256 + threadIdx.x;
        if (i < o.operand.pitch)
            o.operand.numbers[operand_place(row, i, o.operand.pitch)] =
                i < o.cols ? float_to_half(__fmul_rn(x[i], power(forward))) : 0;
    }
    if (threadIdx.x == 0 && blockIdx.x == 0) o.operand.scales[row] = power(254 - forward);
}

struct Angles {
    const u32* positions;
    const float* frequencies;
    float* out;
    u32 num_rows, pairs;
    float factor;
};

// The product is rounded to f32 before the cosine, as the reference implementations do; the cosine itself is taken in
// f64.
KERNEL void rope_angles(Angles a) {
    begin();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.num_rows * a.pairs) return;
    u32 row = i / a.pairs, pair = i % a.pairs;
    double sine, cosine;
    sincos((double)__fmul_rn((float)a.positions[row], a.frequencies[pair]), &sine, &cosine);
    float* out = a.out + (u64)row * 2 * a.pairs;
    out[pair] = __fmul_rn((float)cosine, a.factor);
    out[a.pairs + pair] = __fmul_rn((float)sine, a.factor);
}

struct Rotation {
    float* x;
    const float* angles;
    u32 num_rows, cols, head_size, pairs;
    u32 interleaved;
};

DEVICE void rotate(const Rotation& r, u64 i) {
    u32 heads = r.cols / r.head_size;
    u32 pair = i % r.pairs;
    u32 head = i / r.pairs % heads;
    u64 row = i / r.pairs / heads;
    const float* angles = r.angles + row * 2 * r.pairs;
    float* x = r.x + row * r.cols + head * r.head_size;
    u32 first = r.interleaved ? 2 * pair : pair;
    u32 second = r.interleaved ? 2 * pair + 1 : pair + r.pairs;
    rotate(x[first], x[second], angles[pair], angles[r.pairs + pair]);
}

KERNEL void rope(Rotation r) {
    begin();
    u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    if (i < (u64)r.num_rows * (r.cols / r.head_size) * r.pairs) rotate(r, i);
}

struct ReadBytes {
    const uint4* from;
    u64 len;  // in units of 16 bytes
    u32* sink;
};

// Reads memory and discards it, to measure the bandwidth that bounds decoding.
KERNEL void read_bytes(ReadBytes r) {
    begin();
    u32 sum = 0;
    u64 stride = (u64)gridDim.x * blockDim.x;
    u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    for (; i + 3 * stride < r.len; i += 4 * stride) {
        uint4 a = load_streaming(r.from + i), b = load_streaming(r.from + i + stride);
        uint4 c = load_streaming(r.from + i + 2 * stride), d = load_streaming(r.from + i + 3 * stride);
        sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    // Never true, because memory is zeros; the compiler cannot know that.
    if (sum == 0x12345678u) *r.sink = sum;
}
