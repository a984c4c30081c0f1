//! Mixtures of experts on compute capability 9.0, without the host: the rows of all experts in two products.
//!
//! The device groups the rows by their selected experts and makes operands with a row for each pair (row, expert). The
//! bits of every row are those of `mod.rs`, which groups rows on the host.

use pellucid_tensor::{DType, Error, ExpertMlp};

use super::on_device::{Kind, slices, table};
use crate::gpu::{Gpu, Purpose};
use crate::kernels::experts::expert_panels::{self, ExpertInput, ExpertPanels, GatedOperand};
use crate::kernels::experts::expert_rows::{ExpertGroups, ITEM_BYTES, MAX_EXPERTS};
use crate::kernels::rows::elementwise;
use crate::kernels::rows::route_experts::Route;
use crate::kernels::{GROUP_COLS, Operand};
use crate::memory::operand_bytes;

/// Whether a layer's experts can be computed in panels, and are better so.
pub(super) fn serves(gpu: &Gpu, mlp: &ExpertMlp<'_>, kind: Kind) -> bool {
    let num_pairs = mlp.x.rows() * mlp.routing.num_selected;
    (mlp.x.rows() > 1 && num_pairs * 8 > mlp.experts.len())
        && mlp.experts.len() <= MAX_EXPERTS
        && expert_panels::serve(&gpu.device, [kind.gated, kind.down], kind.width)
}

/// Launches gate and up, then down, of all pairs. Returns the address of the results, a row for each pair.
pub(super) fn launch(gpu: &mut Gpu, mlp: &ExpertMlp<'_>, kind: Kind, route: &Route) -> Result<u64, Error> {
    let (num_pairs, hidden, width) = (mlp.x.rows() * mlp.routing.num_selected, mlp.x.cols(), kind.width);
    let device = &gpu.device.clone();
    let items = expert_panels::items(num_pairs, mlp.experts.len());
    let num_places = items.most * items.rows;
    let table_bytes = items.most * ITEM_BYTES;
    let groups = ExpertGroups {
        experts: route.experts,
        order: gpu.scratch(Purpose::ExpertRows, num_places * 4)?,
        items: gpu.scratch(Purpose::ExpertItems, table_bytes + 4)?,
        num_items: gpu.scratch(Purpose::ExpertItems, table_bytes + 4)? + table_bytes as u64,
        num_pairs: num_pairs as u32,
        item_rows: items.rows as u32,
        num_places: num_places as u32,
    };
    groups.launch(device)?;

    let order = groups.order;
    let maxima = gpu.scratch(Purpose::ExpertMaxima, num_places * 4)?;
    let gated = gpu.scratch(Purpose::ExpertGate, num_places * width * 4)?;
    let down = gpu.scratch(Purpose::ExpertDown, num_pairs * hidden * 4)?;
    let of_rows = gpu.operand(mlp.x, kind.gated)?;
    let purposes = [Purpose::ExpertInput, Purpose::ExpertInputScales];
    let x = operand(gpu, purposes, num_places, hidden, kind.gated == DType::BF16)?;
    let pairs_a_row = mlp.routing.num_selected as u32;
    ExpertInput { x: of_rows, order, maxima, pairs_a_row, operand: x }.launch(device, num_places)?;
    let product = ExpertPanels {
        experts: table(gpu, mlp.experts)?,
        items: groups.items,
        num_items: groups.num_items,
        order,
        x,
        out: gated,
        maxima,
        cols: hidden as u32,
        outputs: width as u32,
        slices: slices(hidden),
        activation: elementwise::activation_code(mlp.activation),
    };
    product.launch(device, kind.gated, items)?;
    let x = operand(gpu, [Purpose::ExpertOperand, Purpose::ExpertScales], num_places, width, kind.down == DType::BF16)?;
    GatedOperand { x: gated, order, maxima, cols: width as u32, operand: x }.launch(device, num_places)?;
    let (cols, outputs, slices) = (width as u32, hidden as u32, slices(width));
    ExpertPanels { x, out: down, maxima: 0, cols, outputs, slices, ..product }.launch(device, kind.down, items)?;
    Ok(down)
}

/// Memory for an operand with a row for each place.
fn operand(
    gpu: &mut Gpu,
    [numbers, scales]: [Purpose; 2],
    num_places: usize,
    cols: usize,
    is_bf16: bool,
) -> Result<Operand, Error> {
    let pitch = cols.next_multiple_of(GROUP_COLS);
    Ok(Operand {
        numbers: gpu.scratch(numbers, operand_bytes(num_places, pitch))?,
        scales: gpu.scratch(scales, num_places * 4)?,
        // A block takes a whole row, so there are no maxima of pieces.
        maxima: 0,
        pitch: pitch as u32,
        is_bf16: u32::from(is_bf16),
    })
}
