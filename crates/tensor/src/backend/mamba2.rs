//! Sizes and arguments of [`Backend::mamba2`](crate::Backend::mamba2).

use super::arguments::{RmsNorm, SequenceSpan, StateSave, StateSpan};
use crate::Tensor;

/// Sizes of a Mamba-2 layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mamba2Shape {
    /// Number of heads, each with a matrix of its own; a multiple of `num_groups`.
    pub num_heads: usize,
    /// Number of inputs of a head.
    pub head_size: usize,
    /// Number of groups of adjacent heads. The heads of a group share B and C.
    pub num_groups: usize,
    /// Number of values of B, and of C, in a group.
    pub state_size: usize,
    /// Number of positions of the convolution, the row's own included.
    pub num_taps: usize,
    /// Number of adjacent outputs that are normalised together; a divisor of [`Mamba2Shape::output_size`].
    pub norm_size: usize,
}

impl Mamba2Shape {
    /// Returns the number of channels of the convolution: the inputs of all heads, then B, then C of all groups.
    pub fn num_channels(self) -> usize {
        self.output_size() + 2 * self.num_groups * self.state_size
    }

    /// Returns the number of values in a row of the output, which is that of the gate too.
    pub fn output_size(self) -> usize {
        self.num_heads * self.head_size
    }

    /// Returns the number of values of the inputs of the last `num_taps - 1` positions, which a state begins with.
    pub fn window_len(self) -> usize {
        (self.num_taps - 1) * self.num_channels()
    }

    /// Returns the number of values of a state: the inputs of the last `num_taps - 1` positions, the oldest first, then
    /// a matrix of `state_size` x `head_size` for each head.
    pub fn state_len(self) -> usize {
        self.window_len() + self.num_heads * self.state_size * self.head_size
    }
}

/// Arguments of [`Backend::mamba2`](crate::Backend::mamba2). Needs [`crate::Extension::Mamba2`].
#[derive(Debug)]
pub struct Mamba2<'a> {
    pub shape: Mamba2Shape,
    /// `[rows][channels]`: the inputs of the heads, B and C, before the convolution.
    pub projected: &'a Tensor,
    /// `[rows][heads * head_size]`: the gate of the output.
    pub gate: &'a Tensor,
    /// `[rows][heads]`: the time step, before the bias and the softplus.
    pub time_step: &'a Tensor,
    /// `[taps][channels]`: the weights of the oldest position first.
    pub taps: &'a Tensor,
    /// Bias of the convolution.
    pub bias: Option<&'a Tensor>,
    /// Rate of the decay for each head; negative.
    pub decay: &'a Tensor,
    /// Added to the time step of each head.
    pub time_bias: &'a Tensor,
    /// The smallest and the largest time step after the softplus.
    pub time_limits: [f32; 2],
    /// Factor of each head's inputs in its outputs.
    pub skip: &'a Tensor,
    /// RMSNorm of the gated outputs, with a weight for each of them. `None` if they are gathered from several ranks
    /// first ([`crate::Extension::SharedMamba2`]).
    pub norm: Option<RmsNorm<'a>>,
    pub sequences: &'a [SequenceSpan],
    /// One for each sequence.
    pub states: &'a [StateSpan],
    pub saves: &'a [StateSave],
}
