//! Layers with a recurrence: the tables of a step's states, and the parameters of the kernels.

use pellucid_tensor::{
    DeltaNet, DeltaNetShape, Error, Mamba2, Mamba2Shape, RmsNorm, SequenceSpan, ShortConvolution, StateSave, StateSpan,
    Tensor,
};

use crate::gpu::{Gpu, Purpose};
use crate::kernels::Operand;
use crate::kernels::recurrence::delta_net::{DeltaNetParameter, DeltaNorm};
use crate::kernels::recurrence::mamba2::{Mamba2Norm, Mamba2Parameter};
use crate::kernels::recurrence::short_convolution::ShortConvolutionParameter;
use crate::kernels::recurrence::{CONVOLVED_RUN, MAX_MATRIX, MAX_TAPS, States};
use crate::memory::{floats, floats_mut, memory};

/// Words of a sequence in the table of spans: `SPAN_WORDS` of states.cu.
pub(crate) const SPAN_WORDS: usize = 5;
/// `NO_SLOT` of states.cu: a state of zeros.
const NO_SLOT: u32 = u32::MAX;
/// Factors of a head and row in `HeadFactors`.
const NUM_FACTORS: usize = 4;

/// The table of spans of states.cu: for each sequence its rows, its slot and its saves, which begin `saves_at` words
/// after the start of the table.
pub(crate) fn span_words(sequences: &[SequenceSpan], states: &[StateSpan], saves_at: usize) -> Vec<u32> {
    let words = |(sequence, state): (&SequenceSpan, &StateSpan)| {
        let first_save = saves_at + 2 * state.saves.start;
        let slot = state.from.unwrap_or(NO_SLOT);
        [sequence.rows.start as u32, sequence.rows.end as u32, slot, first_save as u32, state.saves.len() as u32]
    };
    sequences.iter().zip(states).flat_map(words).collect()
}

/// The saves of states.cu.
pub(crate) fn save_words(saves: &[StateSave]) -> Vec<u32> {
    saves.iter().flat_map(|save| [save.row, save.slot]).collect()
}

/// Runs of rows of the longest sequence, for the grid of a convolution.
fn num_runs(sequences: &[SequenceSpan]) -> u32 {
    sequences.iter().map(|sequence| sequence.rows.len().div_ceil(CONVOLVED_RUN)).max().unwrap_or(0) as u32
}

/// The rows of a step and their states.
#[derive(Clone, Copy)]
struct Chunks<'a> {
    sequences: &'a [SequenceSpan],
    states: &'a [StateSpan],
    saves: &'a [StateSave],
}

impl Gpu {
    pub(crate) fn short_convolution(
        &mut self,
        call: &ShortConvolution<'_>,
        memory: &mut Tensor,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        let (num_taps, channels) = (call.taps.rows(), call.taps.cols());
        assert_eq!((out.rows(), out.cols()), (call.projected.rows(), channels));
        assert_eq!(call.projected.cols(), 3 * channels);
        assert_eq!(memory.cols(), (num_taps - 1) * channels, "a state has all positions of the window but the newest");
        self.check_taps(num_taps)?;
        let chunks = Chunks { sequences: call.sequences, states: call.states, saves: call.saves };
        let parameter = ShortConvolutionParameter {
            states: self.states(chunks, memory)?,
            projected: floats(call.projected),
            taps: floats(call.taps),
            bias: call.bias.map_or(0, floats),
            out: floats_mut(out),
            channels: channels as u32,
            num_taps: num_taps as u32,
        };
        parameter.launch(&self.device, num_runs(call.sequences))
    }

    pub(crate) fn delta_net(
        &mut self,
        call: &DeltaNet<'_>,
        memory: &mut Tensor,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        let DeltaNetShape { num_key_heads, num_value_heads, key_size, value_size, num_taps } = call.shape;
        let (num_rows, channels, width) = (call.projected.rows(), call.shape.num_channels(), call.shape.output_size());
        assert_eq!(call.projected.cols(), channels);
        assert_eq!((call.taps.rows(), call.taps.cols()), (num_taps, channels));
        assert_eq!((call.gate.rows(), call.gate.cols()), (num_rows, width));
        assert_eq!((out.rows(), out.cols()), (num_rows, width));
        for heads in [call.beta, call.time_step] {
            assert_eq!((heads.rows(), heads.cols()), (num_rows, num_value_heads));
        }
        assert_eq!((call.decay.len(), call.time_bias.len()), (num_value_heads, num_value_heads));
        assert_eq!((call.norm.weight.len(), memory.cols()), (value_size, call.shape.state_len()));
        self.check_taps(num_taps)?;
        self.check_matrix("a delta net", key_size, value_size)?;
        let chunks = Chunks { sequences: call.sequences, states: call.states, saves: call.saves };
        let parameter = DeltaNetParameter {
            states: self.states(chunks, memory)?,
            projected: floats(call.projected),
            beta: floats(call.beta),
            time_step: floats(call.time_step),
            taps: floats(call.taps),
            decay: floats(call.decay),
            time_bias: floats(call.time_bias),
            rows: self.scratch(Purpose::Convolved, num_rows * channels * 4)?,
            factors: self.scratch(Purpose::HeadFactors, num_rows * num_value_heads * NUM_FACTORS * 4)?,
            out: floats_mut(out),
            num_key_heads: num_key_heads as u32,
            num_value_heads: num_value_heads as u32,
            key_size: key_size as u32,
            value_size: value_size as u32,
            num_taps: num_taps as u32,
            is_tiled: u32::from(call.order == pellucid_tensor::ValueHeadOrder::Tiled),
        };
        parameter.launch(&self.device, num_runs(call.sequences))?;
        let RmsNorm { weight, eps } = call.norm;
        let operand = operand_of(out);
        let norm = DeltaNorm {
            x: parameter.out,
            gate: floats(call.gate),
            weight: floats(weight),
            num_heads: num_value_heads as u32,
            size: value_size as u32,
            eps,
            with_operand: u32::from(operand.is_some()),
            operand: operand.unwrap_or(Operand::NONE),
        };
        norm.launch(&self.device, num_rows)
    }

    pub(crate) fn mamba2(&mut self, call: &Mamba2<'_>, memory: &mut Tensor, out: &mut Tensor) -> Result<(), Error> {
        let Mamba2Shape { num_heads, head_size, num_groups, state_size, num_taps, norm_size } = call.shape;
        let (num_rows, channels, width) = (call.projected.rows(), call.shape.num_channels(), call.shape.output_size());
        assert_eq!(call.projected.cols(), channels);
        assert_eq!((call.taps.rows(), call.taps.cols()), (num_taps, channels));
        assert!(call.bias.is_none_or(|bias| bias.len() == channels));
        assert_eq!((call.gate.rows(), call.gate.cols()), (num_rows, width));
        assert_eq!((out.rows(), out.cols()), (num_rows, width));
        assert_eq!((call.time_step.rows(), call.time_step.cols()), (num_rows, num_heads));
        assert!([call.decay, call.time_bias, call.skip].iter().all(|heads| heads.len() == num_heads));
        let RmsNorm { weight, eps } = call.norm.expect("ranks do not share out Mamba-2 layers on GPUs");
        assert_eq!((weight.len(), memory.cols()), (width, call.shape.state_len()));
        assert!(width.is_multiple_of(norm_size));
        self.check_taps(num_taps)?;
        self.check_matrix("a Mamba-2 layer", state_size, head_size)?;
        let chunks = Chunks { sequences: call.sequences, states: call.states, saves: call.saves };
        let parameter = Mamba2Parameter {
            states: self.states(chunks, memory)?,
            projected: floats(call.projected),
            time_step: floats(call.time_step),
            taps: floats(call.taps),
            bias: call.bias.map_or(0, floats),
            rate: floats(call.decay),
            time_bias: floats(call.time_bias),
            skip: floats(call.skip),
            rows: self.scratch(Purpose::Convolved, num_rows * channels * 4)?,
            factors: self.scratch(Purpose::HeadFactors, num_rows * num_heads * NUM_FACTORS * 4)?,
            out: floats_mut(out),
            time_limits: call.time_limits,
            num_heads: num_heads as u32,
            head_size: head_size as u32,
            num_groups: num_groups as u32,
            state_size: state_size as u32,
            num_taps: num_taps as u32,
        };
        parameter.launch(&self.device, num_runs(call.sequences))?;
        let operand = operand_of(out);
        let norm = Mamba2Norm {
            x: parameter.out,
            gate: floats(call.gate),
            weight: floats(weight),
            cols: width as u32,
            norm_size: norm_size as u32,
            eps,
            with_operand: u32::from(operand.is_some()),
            operand: operand.unwrap_or(Operand::NONE),
        };
        norm.launch(&self.device, num_rows)
    }

    fn check_taps(&self, num_taps: usize) -> Result<(), Error> {
        if num_taps <= MAX_TAPS {
            return Ok(());
        }
        Err(self.device.refuse("a convolution", format!("{num_taps} taps; the maximum is {MAX_TAPS}")))
    }

    fn check_matrix(&self, layer: &'static str, rows: usize, columns: usize) -> Result<(), Error> {
        if rows.max(columns) <= MAX_MATRIX {
            return Ok(());
        }
        let why = format!("a state of {rows} x {columns} values for each head; the maximum is {MAX_MATRIX} of each");
        Err(self.device.refuse(layer, why))
    }

    /// The states of a step's sequences: the step's own tables, or ones made now.
    fn states(&mut self, chunks: Chunks<'_>, memory: &mut Tensor) -> Result<States, Error> {
        let Chunks { sequences, states, saves } = chunks;
        assert_eq!(states.len(), sequences.len(), "a state for each sequence");
        let slots = states.iter().filter_map(|state| state.from).chain(saves.iter().map(|save| save.slot));
        assert!(slots.into_iter().all(|slot| (slot as usize) < memory.rows()), "slots of the memory");
        let spans = match self.current.find_states(states) {
            Some(address) => address,
            None => {
                let mut words = span_words(sequences, states, states.len() * SPAN_WORDS);
                words.extend(save_words(saves));
                self.index(Purpose::StateTables, &words)?
            }
        };
        Ok(States {
            spans,
            state_len: memory.cols() as u64,
            memory: floats_mut(memory),
            num_sequences: states.len() as u32,
        })
    }
}

/// The operand to write with the results of a layer, if a product is known to read it.
fn operand_of(out: &Tensor) -> Option<Operand> {
    memory(out).operand_to_write(out.rows())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_find_their_saves() {
        let sequences = [0..2, 2..3, 3..7].map(|rows| SequenceSpan { rows, blocks: 0..0 });
        let states = [(None, 0..2), (Some(4), 2..2), (Some(1), 2..3)].map(|(from, saves)| StateSpan { from, saves });
        let saves = [(0, 7), (1, 8), (3, 1)].map(|(row, slot)| StateSave { row, slot });
        // As in a step, other tables lie between the spans and the saves.
        for between in [0, 5] {
            let saves_at = states.len() * SPAN_WORDS + between;
            let mut words = span_words(&sequences, &states, saves_at);
            words.resize(saves_at, 99);
            words.extend(save_words(&saves));
            let expected: [(_, u32, &[[u32; 2]]); 3] =
                [([0, 2], NO_SLOT, &[[0, 7], [1, 8]]), ([2, 3], 4, &[]), ([3, 7], 1, &[[3, 1]])];
            for (span, (rows, slot, saves)) in words.chunks_exact(SPAN_WORDS).zip(expected) {
                assert_eq!((&span[..2], span[2]), (&rows[..], slot));
                let found = &words[span[3] as usize..][..2 * span[4] as usize];
                assert_eq!(found, saves.as_flattened());
            }
        }
    }

    #[test]
    fn runs_of_the_longest_sequence() {
        let of = |lens: &[usize]| {
            let spans: Vec<_> = lens.iter().map(|&len| SequenceSpan { rows: 0..len, blocks: 0..0 }).collect();
            num_runs(&spans)
        };
        assert_eq!([of(&[]), of(&[1, 16]), of(&[17, 1]), of(&[2048])], [0, 1, 2, 128]);
    }
}
