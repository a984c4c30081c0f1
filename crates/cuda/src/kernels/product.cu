// What the kernels of matrix products share: their parameter, and where the columns are cut.

struct LinearPart {
    const u8* weight;
    const float* bias;
    float* out;
    u32 outputs;
    u32 first_tile;  // of this part, among the tiles of all parts
};

static const int MAX_PARTS = 3;

// Up to three matrices of one format with the same input: the products of queries, keys and values, or of gate and up.
struct Linear {
    Operand x;
    u32 num_rows, cols;
    u32 slices;
    u32 num_parts, num_tiles;
    LinearPart parts[MAX_PARTS];
    float* workspace;      // [slices][rows][outputs] when the slices are given to blocks
    const float* x_plain;  // [rows][cols], for weights of f32
};

// Groups of 256 columns.
DEVICE u32 num_groups(u32 cols) { return (cols + 255) / 256; }

DEVICE u32 slice_start(u32 cols, u32 slices, u32 slice) { return slice * num_groups(cols) / slices; }

DEVICE const LinearPart& part_of(const Linear& p, u32 tile) {
    if (p.num_parts > 2 && tile >= p.parts[2].first_tile) return p.parts[2];
    if (p.num_parts > 1 && tile >= p.parts[1].first_tile) return p.parts[1];
    return p.parts[0];
}

DEVICE float finished(float total, float scale, const float* bias, u32 o) {
    total = __fmul_rn(total, scale);
    return bias ? __fadd_rn(total, bias[o]) : total;
}
