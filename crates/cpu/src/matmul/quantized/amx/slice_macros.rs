//! The instructions of [`slice_pipeline`](super::slice_pipeline): rows that are scaled by vectors, with tile
//! instructions between them. They are macros because a function that is always inlined cannot have AVX-512 registers
//! as `asm!` operands.

/// The instructions that scale a row: `product * scale`, rounded once, times the scale of x, added to the row's sum.
/// The conversion of the product to a float costs one integer addition.
macro_rules! plain_row {
    ($r:literal) => {
        concat!(
            "vpaddd zmm31, {magic}, zmmword ptr [{tile} + 64 * ",
            $r,
            "]\nvfmadd213ps zmm31, {scale}, {excess}\nvfmadd231ps {sum",
            $r,
            "}, zmm31, dword ptr [{x_scales} + 4 * ",
            $r,
            "]{{1to16}}"
        )
    };
}

/// Like `plain_row`, with the minimum times the sum of x added.
macro_rules! row_with_min {
    ($r:literal) => {
        concat!(
            "vpaddd zmm31, {magic}, zmmword ptr [{tile} + 64 * ",
            $r,
            "]\nvfmadd213ps zmm31, {scale}, {excess}\nvfmadd231ps zmm31, {mins}, dword ptr [{x_sums} + 4 * ",
            $r,
            "]{{1to16}}\nvfmadd231ps {sum",
            $r,
            "}, zmm31, dword ptr [{x_scales} + 4 * ",
            $r,
            "]{{1to16}}"
        )
    };
}

/// Tile instructions before, between and after two groups of rows that are scaled; the order of instructions is fixed.
macro_rules! interleaved {
    ($slice:ident, $sums:ident, $row:ident, $before:literal, [$($first:ident $f:literal)*], $between:literal,
        [$($second:ident $s:literal)*], $after:literal, $($operands:tt)*) => {
        asm!(
            $before,
            $($row!($f),)*
            $between,
            $($row!($s),)*
            $after,
            stride = in(reg) 2 * SLICE_LEN,
            tile = in(reg) $slice.tile,
            magic = in(zmm_reg) _mm512_set1_ps(MAGIC),
            scale = in(zmm_reg) $slice.scale,
            excess = in(zmm_reg) $slice.excess,
            x_scales = in(reg) $slice.x_scales,
            out("zmm31") _,
            $($first = inout(zmm_reg) $sums[$f],)*
            $($second = inout(zmm_reg) $sums[$s],)*
            $($operands)*
            options(nostack, preserves_flags),
        )
    };
}

/// Scales the first half of a slice's rows. Meanwhile x is loaded for a multiplication into tile `$number`, after that
/// tile is stored and zeroed.
macro_rules! first_half {
    ($slice:ident, $sums:ident, $mins:expr, $rows:expr, $number:literal, $x:expr, $to:expr) => {
        match ($mins, $rows) {
            (Mins::None, BLOCK_ROWS) => {
                first_half!(
                    @ $slice, $sums, plain_row, $number, $x, $to,
                    [sum0 0 sum1 1 sum2 2 sum3 3], [sum4 4 sum5 5 sum6 6 sum7 7],
                )
            }
            (Mins::None, _) => {
                first_half!(@ $slice, $sums, plain_row, $number, $x, $to, [sum0 0 sum1 1], [sum2 2 sum3 3],)
            }
            (_, BLOCK_ROWS) => first_half!(
                @ $slice, $sums, row_with_min, $number, $x, $to,
                [sum0 0 sum1 1 sum2 2 sum3 3], [sum4 4 sum5 5 sum6 6 sum7 7],
                x_sums = in(reg) $slice.x_sums, mins = in(zmm_reg) $slice.mins,
            ),
            _ => first_half!(
                @ $slice, $sums, row_with_min, $number, $x, $to, [sum0 0 sum1 1], [sum2 2 sum3 3],
                x_sums = in(reg) $slice.x_sums, mins = in(zmm_reg) $slice.mins,
            ),
        }
    };
    (
        @ $slice:ident, $sums:ident, $row:ident, $number:literal, $x:expr, $to:expr,
        $first:tt, $second:tt, $($operands:tt)*
    ) => {
        interleaved!(
            $slice, $sums, $row,
            "tileloadd tmm4, [{x} + {stride}]", $first,
            "tilestored [{to} + {stride}], tmm{number}\ntilezero tmm{number}", $second,
            "",
            x = in(reg) $x,
            to = in(reg) $to,
            number = const $number,
            $($operands)*
        )
    };
}

/// Scales the second half of a slice's rows. Meanwhile W is loaded; after the rows, it is multiplied with x.
macro_rules! second_half {
    ($slice:ident, $sums:ident, $mins:expr, $rows:expr, $number:literal, $w:expr) => {
        match ($mins, $rows) {
            (Mins::None, BLOCK_ROWS) => second_half!(
                @ $slice, $sums, plain_row, $number, $w,
                [sum8 8 sum9 9 sum10 10 sum11 11], [sum12 12 sum13 13 sum14 14 sum15 15],
            ),
            (Mins::None, _) => second_half!(@ $slice, $sums, plain_row, $number, $w, [sum4 4 sum5 5], [sum6 6 sum7 7],),
            (_, BLOCK_ROWS) => second_half!(
                @ $slice, $sums, row_with_min, $number, $w,
                [sum8 8 sum9 9 sum10 10 sum11 11], [sum12 12 sum13 13 sum14 14 sum15 15],
                x_sums = in(reg) $slice.x_sums, mins = in(zmm_reg) $slice.mins,
            ),
            _ => second_half!(
                @ $slice, $sums, row_with_min, $number, $w, [sum4 4 sum5 5], [sum6 6 sum7 7],
                x_sums = in(reg) $slice.x_sums, mins = in(zmm_reg) $slice.mins,
            ),
        }
    };
    (@ $slice:ident, $sums:ident, $row:ident, $number:literal, $w:expr, $first:tt, $second:tt, $($operands:tt)*) => {
        interleaved!(
            $slice, $sums, $row,
            "tileloadd tmm5, [{w} + {stride}]", $first,
            "", $second,
            "tdpbssd tmm{number}, tmm4, tmm5\ntilezero tmm4\ntilezero tmm5",
            w = in(reg) $w,
            number = const $number,
            $($operands)*
        )
    };
}

pub(super) use {first_half, interleaved, plain_row, row_with_min, second_half};
