//! Mixtures of experts: rows are routed on the device, and a row adds up its experts in ascending order, whatever other
//! rows select.
//!
//! With few rows, and on compute capability 9.0 with any number, the device does the rest too (`on_device.rs`,
//! `in_panels.rs`). Else the host reads the routing and groups the rows, and each expert's rows are computed together.

mod in_panels;
pub(crate) mod on_device;
pub(crate) mod one_matrix;

use std::ops::Range;

use pellucid_tensor::{Activation, DType, Error, ExpertMlp, Linear, Output, Scoring};

use crate::driver::Grid;
use crate::gpu::{Gpu, Purpose};
use crate::kernels::matmul::linear::LinearProduct;
use crate::kernels::rows::elementwise::{self, Elementwise, MovedRows};
use crate::kernels::rows::route_experts::{AddWeighted, MAX_GROUPS, MAX_SELECTED, Route, ScaleExperts};
use crate::kernels::{GROUP_COLS, Operand};
use crate::memory::{floats, floats_mut, operand_bytes, read};

pub(crate) fn expert_mlp(gpu: &mut Gpu, mlp: &ExpertMlp<'_>, mut out: Output<'_>) -> Result<(), Error> {
    let (num_rows, hidden, num_experts) = (mlp.x.rows(), mlp.x.cols(), mlp.experts.len());
    assert_eq!(mlp.router_logits.cols(), num_experts);
    assert!(mlp.routing.num_selected <= num_experts.min(MAX_SELECTED));
    if mlp.activation == Activation::SquaredRelu {
        let why = "squared ReLU as the activation of a gate has no kernel; it has one for experts without gates";
        return Err(gpu.device.refuse("experts", why));
    }
    if on_device::expert_mlp(gpu, mlp, &mut out)? {
        return Ok(());
    }
    let out = out.rows();
    assert_eq!((out.rows(), out.cols()), (num_rows, hidden));
    gpu.refuse_while_recording()?;
    let device = &gpu.device.clone();
    let chosen = choose(gpu, mlp)?;
    let out_address = floats_mut(out);
    let clear = Elementwise { x: out_address, y: 0, len: out.len() as u64, cap: 0.0, activation: 0 };
    elementwise::launch(device, "clear", clear)?;
    let rows_address = gpu.scratch(Purpose::ExpertRows, chosen.rows_and_weights.len() * 4)?;
    let weights_address = rows_address + (chosen.rows_and_weights.len() / 2 * 4) as u64;
    device.upload(&chosen.rows_and_weights, rows_address)?;
    let x = gpu.scratch(Purpose::ExpertInput, num_rows * hidden * 4)?;
    let down = gpu.scratch(Purpose::ExpertDown, num_rows * hidden * 4)?;
    for (expert, range) in mlp.experts.iter().zip(&chosen.ranges).filter(|(_, range)| !range.is_empty()) {
        let count = range.len();
        let at = |base: u64| base + 4 * range.start as u64;
        let gather = MovedRows { x: floats(mlp.x), rows: at(rows_address), out: x, cols: hidden as u32 };
        device.launch("gather_rows", Grid::linear(count as u32, elementwise::row_threads(hidden)), &gather)?;

        let width = expert.gate.weight.rows();
        let gate = gpu.scratch(Purpose::ExpertGate, num_rows * width * 4)?;
        let up = gpu.scratch(Purpose::ExpertUp, num_rows * width * 4)?;
        products(gpu, x, [count, num_rows], &[(&expert.gate, gate), (&expert.up, up)])?;
        gate_rows(gpu, mlp.activation, up, gate, count * width)?;
        products(gpu, gate, [count, num_rows], &[(&expert.down, down)])?;
        let add = AddWeighted {
            y: down,
            rows: at(rows_address),
            weights: at(weights_address),
            out: out_address,
            cols: hidden as u32,
        };
        device.launch("add_weighted", Grid::linear(count as u32, elementwise::row_threads(hidden)), &add)?;
    }
    Ok(())
}

/// The rows of each expert, one expert after the other, with their weights.
struct RowsByExpert {
    /// All rows, then the bits of all weights, in one upload.
    rows_and_weights: Vec<u32>,
    /// The range of the rows of each expert.
    ranges: Vec<Range<usize>>,
}

/// How to select the experts of every row, in ascending order. The result has all selected experts, then all their
/// weights.
pub(crate) fn routing<Expert>(gpu: &mut Gpu, mlp: &ExpertMlp<'_, Expert>) -> Result<Route, Error> {
    let (num_rows, num_selected) = (mlp.x.rows(), mlp.routing.num_selected);
    let len = num_rows * num_selected;
    let (num_groups, selected_groups) = mlp.routing.groups.unwrap_or((0, 0));
    assert!(num_groups <= MAX_GROUPS, "{num_groups} groups of experts; at most {MAX_GROUPS} on this device");
    let experts = gpu.scratch(Purpose::RoutedExperts, len * 8)?;
    Ok(Route {
        logits: floats(mlp.router_logits),
        bias: mlp.score_bias.map_or(0, floats),
        experts,
        weights: experts + (len * 4) as u64,
        num_rows: num_rows as u32,
        num_experts: mlp.experts.len() as u32,
        num_selected: num_selected as u32,
        normalize: u32::from(mlp.routing.normalize),
        is_sigmoid: u32::from(mlp.routing.scoring == Scoring::Sigmoid),
        num_groups: num_groups as u32,
        selected_groups: selected_groups as u32,
        scale: mlp.routing.scale,
    })
}

/// Selects the experts of every row, and multiplies their weights by the experts' factors.
pub(crate) fn launch_route<Expert>(gpu: &Gpu, mlp: &ExpertMlp<'_, Expert>, route: &Route) -> Result<(), Error> {
    route.launch(&gpu.device)?;
    let Some(scales) = mlp.expert_scales else { return Ok(()) };
    assert_eq!(scales.len(), mlp.experts.len(), "a factor for each expert");
    let num_pairs = mlp.x.rows() * mlp.routing.num_selected;
    let parameter = ScaleExperts {
        experts: route.experts,
        weights: route.weights,
        scales: floats(scales),
        num_pairs: num_pairs as u32,
    };
    gpu.device.launch("scale_experts", Grid::items(num_pairs, 128), &parameter)
}

fn choose(gpu: &mut Gpu, mlp: &ExpertMlp<'_>) -> Result<RowsByExpert, Error> {
    let (route, num_selected) = (routing(gpu, mlp)?, mlp.routing.num_selected);
    launch_route(gpu, mlp, &route)?;
    let len = mlp.x.rows() * num_selected;
    let mut found = vec![0u32; 2 * len];
    gpu.device.download(route.experts, &mut found)?;
    let (experts, weights) = found.split_at(len);
    // Sorted by expert, then by row.
    let mut order: Vec<usize> = (0..len).collect();
    order.sort_by_key(|&i| experts[i]);
    let starts = |expert: usize| order.partition_point(|&i| (experts[i] as usize) < expert);
    let rows = order.iter().map(|&i| (i / num_selected) as u32);
    Ok(RowsByExpert {
        ranges: (0..mlp.experts.len()).map(|expert| starts(expert)..starts(expert + 1)).collect(),
        rows_and_weights: rows.chain(order.iter().map(|&i| weights[i])).collect(),
    })
}

/// `out = W x + b` for each map, in scratch memory; maps of one format together. `most` is the maximum number of rows
/// that an expert may have in this step: memory is allocated for as many, so that it seldom moves.
fn products(gpu: &mut Gpu, x: u64, [num_rows, most]: [usize; 2], maps: &[(&Linear, u64)]) -> Result<(), Error> {
    let (dtype, cols) = (maps[0].0.weight.dtype(), maps[0].0.weight.cols());
    let same = maps.iter().take_while(|(linear, _)| linear.weight.dtype() == dtype).count();
    let (maps, rest) = maps.split_at(same);
    let part = |&(linear, out): &(&Linear, u64)| {
        (read(&linear.weight), linear.bias.as_ref().map_or(0, floats), out, linear.weight.rows())
    };
    if dtype == DType::F32 {
        for map in maps {
            LinearProduct::new(Operand::NONE, num_rows, cols, &[part(map)]).launch_f32(&gpu.device, x)?;
        }
    } else {
        let pitch = cols.next_multiple_of(GROUP_COLS);
        let operand = Operand {
            numbers: gpu.scratch(Purpose::ExpertOperand, operand_bytes(most, pitch))?,
            scales: gpu.scratch(Purpose::ExpertScales, most * 4)?,
            // A block takes a whole row here, so there are no maxima of pieces.
            maxima: 0,
            pitch: pitch as u32,
            is_bf16: u32::from(dtype == DType::BF16),
        };
        elementwise::make_operand(&gpu.device, x, num_rows, cols, operand)?;
        let parts: Vec<_> = maps.iter().map(part).collect();
        let left = LinearProduct::new(operand, num_rows, cols, &parts)
            .launch(&gpu.device.clone(), dtype, |bytes| gpu.scratch(Purpose::Slices, bytes))?;
        if let Some(product) = left {
            product.combine(&gpu.device)?;
        }
    }
    if rest.is_empty() { Ok(()) } else { products(gpu, x, [num_rows, most], rest) }
}

fn gate_rows(gpu: &mut Gpu, activation: Activation, up: u64, gate: u64, len: usize) -> Result<(), Error> {
    let activation = elementwise::activation_code(activation);
    let parameter = Elementwise { x: gate, y: up, len: len as u64, cap: 0.0, activation };
    elementwise::launch(&gpu.device, "gate", parameter)
}
