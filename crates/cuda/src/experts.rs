//! Mixtures of experts: rows are routed on the device, grouped on the host, and each expert's rows are computed together.
//!
//! The host must see the routing, so a step with experts is never recorded. Experts are taken in ascending order, and a row adds them up
//! in that order whatever the other rows chose.

use pellucid_tensor::{Activation, Error, ExpertMlp, Linear, Tensor};

use crate::backend::{CudaBackend, Purpose};
use crate::driver::Grid;
use crate::kernels::experts::{AddWeighted, Route};
use crate::kernels::linear::LinearProduct;
use crate::kernels::rows::{self, Elementwise, Gather};
use crate::kernels::{GROUP_COLS, Operand};
use crate::memory::{floats, floats_mut, operand_bytes, read};
use pellucid_tensor::DType;

pub(crate) fn expert_mlp(backend: &CudaBackend, mlp: ExpertMlp<'_>, out: &mut Tensor) -> Result<(), Error> {
    let (num_rows, hidden, num_experts) = (mlp.x.rows(), mlp.x.cols(), mlp.experts.len());
    assert_eq!(mlp.router_logits.cols(), num_experts);
    assert_eq!((out.rows(), out.cols()), (num_rows, hidden));
    assert!(mlp.routing.num_selected <= num_experts);
    backend.host_is_needed()?;
    let device = &backend.device;
    let chosen = choose(backend, &mlp)?;
    let out_address = floats_mut(out);
    let clear = Elementwise { x: out_address, y: 0, len: out.len() as u64, cap: 0.0, activation: 0 };
    rows::elementwise(device, "clear", clear)?;
    for (expert, chosen) in mlp.experts.iter().zip(&chosen) {
        if chosen.is_empty() {
            continue;
        }
        let (indices, weights): (Vec<u32>, Vec<f32>) = chosen.iter().copied().unzip();
        let count = indices.len();
        let rows_address = backend.scratch(Purpose::ExpertRows, num_rows * 4)?;
        let weights_address = backend.scratch(Purpose::ExpertWeights, num_rows * 4)?;
        device.upload(&indices, rows_address)?;
        device.upload(&weights, weights_address)?;
        let x = backend.scratch(Purpose::ExpertInput, num_rows * hidden * 4)?;
        let gather = Gather { x: floats(mlp.x), rows: rows_address, out: x, cols: hidden as u32 };
        device.launch("gather_rows", Grid::linear(count as u32, rows::row_threads(hidden)), &gather)?;

        let width = expert.gate.weight.rows();
        let gate = backend.scratch(Purpose::ExpertGate, num_rows * width * 4)?;
        let up = backend.scratch(Purpose::ExpertUp, num_rows * width * 4)?;
        let down = backend.scratch(Purpose::ExpertDown, num_rows * hidden * 4)?;
        product(backend, x, count, &expert.gate, gate)?;
        product(backend, x, count, &expert.up, up)?;
        gate_rows(backend, mlp.activation, up, gate, count * width)?;
        product(backend, gate, count, &expert.down, down)?;
        let add = AddWeighted {
            y: down,
            rows: rows_address,
            weights: weights_address,
            out: out_address,
            cols: hidden as u32,
        };
        device.launch("add_weighted", Grid::linear(count as u32, rows::row_threads(hidden)), &add)?;
    }
    Ok(())
}

/// The rows of each expert, with their weights.
fn choose(backend: &CudaBackend, mlp: &ExpertMlp<'_>) -> Result<Vec<Vec<(u32, f32)>>, Error> {
    let (num_rows, num_selected) = (mlp.x.rows(), mlp.routing.num_selected);
    let len = num_rows * num_selected;
    let route = Route {
        logits: floats(mlp.router_logits),
        experts: backend.scratch(Purpose::RoutedExperts, len * 4)?,
        weights: backend.scratch(Purpose::RoutedWeights, len * 4)?,
        num_rows: num_rows as u32,
        num_experts: mlp.experts.len() as u32,
        num_selected: num_selected as u32,
        normalize: u32::from(mlp.routing.normalize),
    };
    backend.device.launch("route", Grid::items(num_rows, 64), &route)?;
    let (mut experts, mut weights) = (vec![0u32; len], vec![0f32; len]);
    backend.device.download(route.experts, &mut experts)?;
    backend.device.download(route.weights, &mut weights)?;
    let mut rows_of_expert = vec![Vec::new(); mlp.experts.len()];
    for (i, (&expert, &weight)) in experts.iter().zip(&weights).enumerate() {
        rows_of_expert[expert as usize].push(((i / num_selected) as u32, weight));
    }
    Ok(rows_of_expert)
}

/// `out = W x + b` between scratch memories.
fn product(backend: &CudaBackend, x: u64, num_rows: usize, linear: &Linear, out: u64) -> Result<(), Error> {
    let (dtype, outputs, cols) = (linear.weight.dtype(), linear.weight.rows(), linear.weight.cols());
    let part = (read(&linear.weight), linear.bias.as_ref().map_or(0, floats), out, outputs);
    if dtype == DType::F32 {
        return LinearProduct::new(Operand::NONE, num_rows, cols, &[part]).launch_plain(&backend.device, x);
    }
    let pitch = cols.next_multiple_of(GROUP_COLS);
    let operand = Operand {
        numbers: backend.scratch(Purpose::ExpertOperand, operand_bytes(num_rows, pitch))?,
        scales: backend.scratch(Purpose::ExpertScales, num_rows * 4)?,
        // Rows are taken whole here.
        maxima: 0,
        pitch: pitch as u32,
        is_bf16: u32::from(dtype == DType::BF16),
    };
    rows::make_operand(&backend.device, x, num_rows, cols, operand)?;
    LinearProduct::new(operand, num_rows, cols, &[part])
        .launch(&backend.device, dtype, |bytes| backend.scratch(Purpose::Slices, bytes))
}

fn gate_rows(backend: &CudaBackend, activation: Activation, up: u64, gate: u64, len: usize) -> Result<(), Error> {
    let activation = rows::activation_code(activation);
    let parameter = Elementwise { x: gate, y: up, len: len as u64, cap: 0.0, activation };
    rows::elementwise(&backend.device, "gate", parameter)
}
