//! Products of pairs (row, expert) with one matrix of each expert, without the host: experts without gates, and the
//! maps of heads, where a head is an expert that every row selects.

use pellucid_tensor::{DType, Error, ExpertMlp, Linear, Output, PlainMlp, Tensor};

use super::on_device;
use crate::driver::Grid;
use crate::gpu::{Gpu, Purpose};
use crate::kernels::experts::expert_rows::{ExpertGroups, ExpertProduct, ITEM_BYTES, Items, MAX_EXPERTS, stay_pairs};
use crate::kernels::rows::elementwise::{self, Elementwise, HeadRows};
use crate::kernels::rows::route_experts::Route;
use crate::kernels::{GROUP_COLS, Operand};
use crate::memory::{floats, floats_mut, operand_bytes, read};

/// Matrices of one shape and format, and the rows that they multiply.
#[derive(Clone, Copy)]
struct Product {
    /// Address of the table of the matrices.
    table: u64,
    num_experts: usize,
    dtype: DType,
    cols: usize,
    outputs: usize,
    /// Address of the rows, of `cols` values, and their number.
    x: u64,
    num_rows: usize,
    /// Consecutive pairs that share a row.
    pairs_a_row: usize,
    /// Address of the expert of each pair.
    chosen: u64,
    out: u64,
}

/// Computes, for each row, the weighted sum of the experts `down(activation(up x))` that it selects.
pub(crate) fn plain_expert_mlp(gpu: &mut Gpu, mlp: &ExpertMlp<'_, PlainMlp>, out: Output<'_>) -> Result<(), Error> {
    let (num_rows, hidden, num_selected) = (mlp.x.rows(), mlp.x.cols(), mlp.routing.num_selected);
    let width = mlp.experts.first().map_or(0, |expert| expert.up.weight.rows());
    let num_pairs = num_rows * num_selected;
    let ups = maps_table(gpu, mlp.experts.iter().map(|expert| &expert.up))?;
    let downs = maps_table(gpu, mlp.experts.iter().map(|expert| &expert.down))?;
    let route = super::routing(gpu, mlp)?;
    super::launch_route(gpu, mlp, &route)?;
    let inner = gpu.scratch(Purpose::ExpertGate, num_pairs * width * 4)?;
    let up = Product {
        table: ups.address,
        num_experts: mlp.experts.len(),
        dtype: ups.dtype,
        cols: hidden,
        outputs: width,
        x: floats(mlp.x),
        num_rows,
        pairs_a_row: num_selected,
        chosen: route.experts,
        out: inner,
    };
    up.launch(gpu)?;
    let activation = elementwise::activation_code(mlp.activation);
    let parameter = Elementwise { x: inner, y: 0, len: (num_pairs * width) as u64, cap: 0.0, activation };
    elementwise::launch(&gpu.device, "activate", parameter)?;
    let results = gpu.scratch(Purpose::ExpertDown, num_pairs * hidden * 4)?;
    let (x, out_address) = (inner, results);
    let down = Product { table: downs.address, dtype: downs.dtype, cols: width, outputs: hidden, x, ..up };
    Product { num_rows: num_pairs, pairs_a_row: 1, out: out_address, ..down }.launch(gpu)?;
    on_device::add_up(gpu, mlp, &route, results, &mut { out })
}

/// `out[r][h] = maps[h] x[r][h]`
pub(crate) fn map_heads(gpu: &mut Gpu, x: &Tensor, maps: &[Linear], out: &mut Tensor) -> Result<(), Error> {
    let num_heads = maps.len();
    let (outputs, cols) = (maps[0].weight.rows(), maps[0].weight.cols());
    assert_eq!((x.cols(), out.cols()), (num_heads * cols, num_heads * outputs));
    assert_eq!(x.rows(), out.rows());
    assert!(num_heads <= MAX_EXPERTS, "{num_heads} heads; at most {MAX_EXPERTS} on this device");
    let num_pairs = x.rows() * num_heads;
    let table = maps_table(gpu, maps.iter())?;
    let chosen = gpu.scratch(Purpose::RoutedExperts, num_pairs * 4)?;
    let heads = HeadRows { heads: chosen, num_pairs: num_pairs as u32, num_heads: num_heads as u32 };
    gpu.device.launch("heads_of_rows", Grid::items(num_pairs, 256), &heads)?;
    let product = Product {
        table: table.address,
        num_experts: num_heads,
        dtype: table.dtype,
        cols,
        outputs,
        x: floats(x),
        num_rows: num_pairs,
        pairs_a_row: 1,
        chosen,
        out: floats_mut(out),
    };
    product.launch(gpu)
}

/// The addresses of matrices on the device, and their format.
struct Table {
    address: u64,
    dtype: DType,
}

/// A table in which each matrix has the place of an expert's last one.
fn maps_table<'a>(gpu: &mut Gpu, maps: impl Iterator<Item = &'a Linear> + Clone) -> Result<Table, Error> {
    let first = maps.clone().next().expect("a matrix");
    let form = |map: &Linear| (map.weight.dtype(), map.weight.rows(), map.weight.cols());
    if let Some(other) = maps.clone().find(|map| form(map) != form(first)) {
        let why = format!("matrices of one layer differ in format or shape: {:?} and {:?}", form(first), form(other));
        return Err(gpu.device.refuse("experts without gates", why));
    }
    let addresses = |map: &Linear| [0, 0, read(&map.weight), 0, 0, map.bias.as_ref().map_or(0, floats)];
    let address = on_device::keep_table(gpu, read(&first.weight), maps.flat_map(addresses).collect())?;
    Ok(Table { address, dtype: first.weight.dtype() })
}

impl Product {
    fn launch(self, gpu: &mut Gpu) -> Result<(), Error> {
        let device = &gpu.device.clone();
        let num_pairs = self.num_rows * self.pairs_a_row;
        if num_pairs == 0 {
            return Ok(());
        }
        let is_f32 = self.dtype == DType::F32;
        let product = ExpertProduct {
            experts: self.table,
            chosen: self.chosen,
            items: 0,
            num_items: 0,
            order: 0,
            x: Operand::NONE,
            x_plain: self.x,
            out: self.out,
            cols: self.cols as u32,
            outputs: self.outputs as u32,
            slices: on_device::slices(self.cols),
            pairs_a_row: self.pairs_a_row as u32,
            // The place of `down` in the table.
            first_part: 2,
            activation: 0,
            route: Route::NONE,
            arrived: 0,
            sum: 0,
            residual: 0,
        };
        // A single row of heads, or of few experts: no two pairs share a matrix.
        let rows_of_pairs = num_pairs.div_ceil(self.num_experts);
        if !is_f32 && stay_pairs(device, rows_of_pairs, num_pairs, self.num_experts, self.cols) {
            return product.launch_pairs(device, self.dtype, num_pairs);
        }
        let num_items = Items::of(num_pairs, self.num_experts, is_f32);
        let items = gpu.scratch(Purpose::ExpertItems, num_items.most * ITEM_BYTES + 4)?;
        let groups = ExpertGroups {
            experts: self.chosen,
            order: gpu.scratch(Purpose::ExpertRows, num_pairs * 4)?,
            items,
            num_items: items + (num_items.most * ITEM_BYTES) as u64,
            num_pairs: num_pairs as u32,
            item_rows: num_items.rows as u32,
            num_places: 0,
        };
        groups.launch(device)?;
        let x = if is_f32 { Operand::NONE } else { self.operand(gpu)? };
        let product = ExpertProduct { items, num_items: groups.num_items, order: groups.order, x, ..product };
        product.launch(device, self.dtype, num_items)
    }

    /// The operand of the rows.
    fn operand(self, gpu: &mut Gpu) -> Result<Operand, Error> {
        let pitch = self.cols.next_multiple_of(GROUP_COLS);
        let operand = Operand {
            numbers: gpu.scratch(Purpose::ExpertOperand, operand_bytes(self.num_rows, pitch))?,
            scales: gpu.scratch(Purpose::ExpertScales, self.num_rows * 4)?,
            // A block takes a whole row here, so there are no maxima of pieces.
            maxima: 0,
            pitch: pitch as u32,
            is_bf16: u32::from(self.dtype == DType::BF16),
        };
        elementwise::make_operand(&gpu.device, self.x, self.num_rows, self.cols, operand)?;
        Ok(operand)
    }
}
