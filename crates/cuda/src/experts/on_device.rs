//! Mixtures of experts in steps of few rows, without the host, so that such steps can be recorded.
//!
//! The device groups the rows by their selected experts, and finds the experts' weights through a table that was
//! uploaded once. The bits of every row are those of `mod.rs`, which groups rows on the host.

use std::collections::HashMap;

use pellucid_tensor::{DType, Error, ExpertMlp, GatedMlp, Linear, Output, Pending, Residual, Routing};

use super::in_panels;
use crate::driver::Buffer;
use crate::gpu::{Gpu, Purpose};
use crate::kernels::experts::expert_rows::{
    AddExperts, ExpertGroups, ExpertProduct, ITEM_BYTES, Items, MAX_EXPERTS, stay_pairs,
};
use crate::kernels::matmul::linear::LinearProduct;
use crate::kernels::rows::elementwise;
use crate::kernels::rows::route_experts::Route;
use crate::kernels::{GROUP_COLS, Operand};
use crate::memory::{floats, floats_mut, operand_bytes, read};
use crate::step::MAX_RECORDED_ROWS;

/// Whether `num_rows` rows are computed without the host: if a step of `num_rows` rows can be recorded, and each expert
/// has too few rows for the kernels of many rows.
pub(crate) fn serves(num_rows: usize, num_experts: usize, routing: Routing) -> bool {
    num_rows <= MAX_RECORDED_ROWS
        && num_experts <= MAX_EXPERTS
        && Items::pay(num_rows * routing.num_selected, num_experts)
}

/// The addresses of the weights of a layer's experts and the device's copy of them, by the first of the addresses.
pub(crate) type Tables = HashMap<u64, (Vec<u64>, Buffer)>;

/// The properties that all experts of a layer share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kind {
    /// Format of gate and up.
    pub(super) gated: DType,
    pub(super) down: DType,
    pub(super) width: usize,
}

impl Kind {
    fn of(expert: &GatedMlp) -> Option<Kind> {
        let GatedMlp { gate, up, down } = expert;
        let kind = Kind { gated: gate.weight.dtype(), down: down.weight.dtype(), width: gate.weight.rows() };
        let fits = up.weight.dtype() == kind.gated
            && (up.weight.rows(), down.weight.cols()) == (kind.width, kind.width)
            && (gate.weight.cols(), up.weight.cols()) == (down.weight.rows(), down.weight.rows());
        fits.then_some(kind)
    }

    /// The kind of a layer's experts, if all have the same.
    fn of_all(experts: &[GatedMlp]) -> Option<Kind> {
        let kind = Kind::of(experts.first()?)?;
        experts.iter().all(|expert| Kind::of(expert) == Some(kind)).then_some(kind)
    }

    fn has_f32(self) -> bool {
        [self.gated, self.down].contains(&DType::F32)
    }
}

/// Computes experts on the device. Returns false, and does nothing, with many rows, unless panels serve them, or with
/// experts of different kinds.
pub(crate) fn expert_mlp(gpu: &mut Gpu, mlp: &ExpertMlp<'_>, out: &mut Output<'_>) -> Result<bool, Error> {
    let Some(kind) = Kind::of_all(mlp.experts) else { return Ok(false) };
    let in_panels = in_panels::serves(gpu, mlp, kind);
    if !in_panels && !serves(mlp.x.rows(), mlp.experts.len(), mlp.routing) {
        return Ok(false);
    }
    let route = super::routing(gpu, mlp)?;
    if in_panels {
        super::launch_route(gpu, mlp, &route)?;
        let results = in_panels::launch(gpu, mlp, kind, &route)?;
        add_up(gpu, mlp, &route, results, out)?;
    } else {
        launch_pairs_or_items(gpu, mlp, kind, &route, out)?;
    }
    Ok(true)
}

/// Routes the rows, launches gate and up, then down, of all pairs, and adds up the results of each row.
fn launch_pairs_or_items(
    gpu: &mut Gpu,
    mlp: &ExpertMlp<'_>,
    kind: Kind,
    route: &Route,
    out: &mut Output<'_>,
) -> Result<(), Error> {
    let (num_rows, hidden) = (mlp.x.rows(), mlp.x.cols());
    let table = table(gpu, mlp.experts)?;
    let device = &gpu.device.clone();
    let num_pairs = num_rows * mlp.routing.num_selected;
    let gated = gated_product(mlp, kind, table, gpu.scratch(Purpose::ExpertGate, num_pairs * kind.width * 4)?);
    let down = down_product(gated, kind, hidden, gpu.scratch(Purpose::ExpertDown, num_pairs * hidden * 4)?);
    let most_cols = hidden.max(kind.width);
    if kind.has_f32() || !stay_pairs(device, num_rows, num_pairs, mlp.experts.len(), most_cols) {
        super::launch_route(gpu, mlp, route)?;
        launch_items(gpu, mlp, kind, route.experts, [gated, down])?;
        return add_up(gpu, mlp, route, down.out, out);
    }
    // Two launches do everything: routing with gate and up, and the sum of each row with down.
    let is_fused = route.can_be_fused() && mlp.expert_scales.is_none();
    if !is_fused {
        super::launch_route(gpu, mlp, route)?;
    }
    let gated_route = if is_fused { *route } else { Route::NONE };
    ExpertProduct { chosen: route.experts, route: gated_route, ..gated }.launch_pairs(device, kind.gated, num_pairs)?;
    let arrived = gpu.counters(num_rows * down.num_sets(device, num_pairs) as usize)?;
    let (sum, residual) = destination(gpu, num_rows, out);
    ExpertProduct { chosen: route.experts, route: *route, arrived, sum, residual, ..down }
        .launch_pairs(device, kind.down, num_pairs)
}

/// Addresses that the sum of each row is written to, and added to; 0 for none.
fn destination(gpu: &Gpu, num_rows: usize, out: &mut Output<'_>) -> (u64, u64) {
    match out {
        Output::Rows(out) => (floats_mut(out), 0),
        Output::Residual(Residual { hidden, update, pending }) if gpu.fuses(num_rows, hidden.cols()) => {
            *pending = Pending::Nothing;
            (floats_mut(update), floats_mut(hidden))
        }
        Output::Residual(Residual { update, pending, .. }) => {
            *pending = Pending::Update;
            (floats_mut(update), 0)
        }
    }
}

/// Adds up the weighted results of the pairs of each row.
pub(super) fn add_up<Expert>(
    gpu: &mut Gpu,
    mlp: &ExpertMlp<'_, Expert>,
    route: &Route,
    results: u64,
    out: &mut Output<'_>,
) -> Result<(), Error> {
    let num_rows = mlp.x.rows();
    let (cols, num_selected) = (mlp.x.cols() as u32, mlp.routing.num_selected as u32);
    let (out, residual) = destination(gpu, num_rows, out);
    let sum = AddExperts { y: results, weights: route.weights, out, residual, cols, num_selected };
    sum.launch(&gpu.device, num_rows)
}

/// Launches gate and up, then down, with pairs grouped by expert; `chosen` has the expert of each pair.
fn launch_items(
    gpu: &mut Gpu,
    mlp: &ExpertMlp<'_>,
    kind: Kind,
    chosen: u64,
    [gated, down]: [ExpertProduct; 2],
) -> Result<(), Error> {
    let device = &gpu.device.clone();
    let num_pairs = mlp.x.rows() * mlp.routing.num_selected;
    let num_items = Items::of(num_pairs, mlp.experts.len(), kind.has_f32());
    let items = gpu.scratch(Purpose::ExpertItems, num_items.most * ITEM_BYTES + 4)?;
    let groups = ExpertGroups {
        experts: chosen,
        order: gpu.scratch(Purpose::ExpertRows, num_pairs * 4)?,
        items,
        num_items: items + (num_items.most * ITEM_BYTES) as u64,
        num_pairs: num_pairs as u32,
        item_rows: num_items.rows as u32,
        num_places: 0,
    };
    groups.launch(device)?;
    let of_items = |product, x| ExpertProduct { items, num_items: groups.num_items, order: groups.order, x, ..product };
    let x = if kind.gated == DType::F32 { Operand::NONE } else { gpu.operand(mlp.x, kind.gated)? };
    of_items(gated, x).launch(device, kind.gated, num_items)?;
    let x = gated_operand(gpu, gated.out, num_pairs, kind)?;
    of_items(down, x).launch(device, kind.down, num_items)
}

/// The product with gate and up of all rows. The pairs (row, expert) are still to be set.
fn gated_product(mlp: &ExpertMlp<'_>, kind: Kind, table: u64, gated: u64) -> ExpertProduct {
    let hidden = mlp.x.cols();
    ExpertProduct {
        experts: table,
        chosen: 0,
        items: 0,
        num_items: 0,
        order: 0,
        x: Operand::NONE,
        x_plain: floats(mlp.x),
        out: gated,
        cols: hidden as u32,
        outputs: kind.width as u32,
        slices: slices(hidden),
        pairs_a_row: mlp.routing.num_selected as u32,
        first_part: 0,
        activation: elementwise::activation_code(mlp.activation),
        route: Route::NONE,
        arrived: 0,
        sum: 0,
        residual: 0,
    }
}

/// The product with down of the output of gate and up, for the same pairs.
fn down_product(gated: ExpertProduct, kind: Kind, hidden: usize, down: u64) -> ExpertProduct {
    ExpertProduct {
        x_plain: gated.out,
        out: down,
        cols: kind.width as u32,
        outputs: hidden as u32,
        slices: slices(kind.width),
        pairs_a_row: 1,
        first_part: 2,
        ..gated
    }
}

/// The operand of the output of gate and up, a row for each pair.
fn gated_operand(gpu: &mut Gpu, gated: u64, num_pairs: usize, kind: Kind) -> Result<Operand, Error> {
    if kind.down == DType::F32 {
        return Ok(Operand::NONE);
    }
    let pitch = kind.width.next_multiple_of(GROUP_COLS);
    let operand = Operand {
        numbers: gpu.scratch(Purpose::ExpertOperand, operand_bytes(num_pairs, pitch))?,
        scales: gpu.scratch(Purpose::ExpertScales, num_pairs * 4)?,
        // A block takes a whole row here, so there are no maxima of pieces.
        maxima: 0,
        pitch: pitch as u32,
        is_bf16: u32::from(kind.down == DType::BF16),
    };
    elementwise::make_operand(&gpu.device, gated, num_pairs, kind.width, operand)?;
    Ok(operand)
}

/// Number of slices of every product of rows of `cols` columns.
pub(super) fn slices(cols: usize) -> u32 {
    LinearProduct::new(Operand::NONE, 1, cols, &[(0, 0, 0, 1)]).slices
}

/// Address of `ExpertWeights` of expert_rows.cu for each expert.
pub(super) fn table(gpu: &mut Gpu, experts: &[GatedMlp]) -> Result<u64, Error> {
    let weight = |linear: &Linear| read(&linear.weight);
    let bias = |linear: &Linear| linear.bias.as_ref().map_or(0, floats);
    let addresses_of = |GatedMlp { gate, up, down }: &GatedMlp| {
        [weight(gate), weight(up), weight(down), bias(gate), bias(up), bias(down)]
    };
    keep_table(gpu, read(&experts[0].gate.weight), experts.iter().flat_map(addresses_of).collect())
}

/// Address of a table on the device. The copy is kept until another table replaces it whose first matrix is `first`.
pub(super) fn keep_table(gpu: &mut Gpu, first: u64, addresses: Vec<u64>) -> Result<u64, Error> {
    if let Some((_, buffer)) = gpu.expert_tables.get(&first).filter(|(known, _)| *known == addresses) {
        return Ok(buffer.address());
    }
    gpu.refuse_while_recording()?;
    let buffer = gpu.device.allocate(addresses.len() * 8)?;
    gpu.device.upload(&addresses, buffer.address())?;
    let address = buffer.address();
    gpu.expert_tables.insert(first, (addresses, buffer));
    Ok(address)
}
