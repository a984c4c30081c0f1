// Tables of the kernels of experts.

// The weights of one expert: gate, up, down.
struct ExpertWeights {
    const u8* weight[3];
    const float* bias[3];
};

struct ExpertItem {
    u32 expert;
    u32 first, count;  // range of `order`
};

// A place of `order` that has no pair: experts may begin at multiples of a number of places.
static const u32 NO_PAIR = 0xffffffffu;
