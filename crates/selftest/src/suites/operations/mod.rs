//! One suite for every backend: each operation against its formula, written here in f64 with no regard for speed.
//!
//! Each check states its tolerance, as a multiple of the rounding that the operation's sums allow.

mod attention;
mod elementwise;
mod experts;
mod latent_attention;
mod linear;
mod mamba2;
mod recurrence;

use pellucid_tensor::Backend;

pub use linear::{large_weights, rounds_activations};

use super::harness::Harness;
use super::random_data::RandomData;

type Check = fn(&mut Harness<'_>);

const CHECKS: [(&str, Check); 17] = [
    ("linear, every format", linear::linear),
    ("embed and gather", linear::embed),
    ("rms norm, rows and heads", elementwise::rms_norm),
    ("layer norm", elementwise::layer_norm),
    ("add and soft cap", elementwise::add_and_cap),
    ("activations and gates", elementwise::activations),
    ("clamped SwiGLU", elementwise::clamped_swiglu),
    ("gates by other columns", elementwise::gates_by_columns),
    ("rope, both styles", elementwise::rope),
    ("paged attention", attention::attention),
    ("latent attention", latent_attention::latent_attention),
    ("experts", experts::experts),
    ("experts with sigmoid scores", experts::sigmoid_experts),
    ("experts without gates", experts::plain_experts),
    ("short convolution, in any chunks", recurrence::short_convolution),
    ("delta net, in any chunks", recurrence::delta_net),
    ("Mamba-2 layer, in any chunks", mamba2::mamba2),
];

/// Runs the suite and returns the names of its checks. Panics at the first check that fails.
pub fn run(backend: &dyn Backend) -> Vec<&'static str> {
    let mut harness = Harness { backend, random: RandomData(1) };
    CHECKS
        .into_iter()
        .map(|(name, check)| {
            check(&mut harness);
            name
        })
        .collect()
}

/// Returns the names of the suite's checks, each with a function that runs it.
pub fn checks() -> impl Iterator<Item = (&'static str, impl Fn(&dyn Backend))> {
    CHECKS.into_iter().map(|(name, check)| {
        (name, move |backend: &dyn Backend| check(&mut Harness { backend, random: RandomData(1) }))
    })
}
