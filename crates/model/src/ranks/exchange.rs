//! [`Ranks`]: gathers the parts of a product that each rank has computed.
//!
//! Activations are gathered once before and once after each product that needs all of its inputs: before it as the
//! product rounds them, if it does, else in F32. Parts are matrices of their own, so those of several rows are brought
//! into rows after the exchange.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pellucid_tensor::{
    Backend, Communicator, Error, ExpertMlp, Input, Linear, Output, PlainMlp, RmsNorm, RoundedGroups, Routing, Tensor,
};

use super::sharing::{Columns, Sharing};

/// The gathers of one rank since it was loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GatherStats {
    pub num_gathers: u64,
    /// Bytes of the gathered rows as they are exchanged, this rank's part included.
    pub bytes: u64,
    /// Time from the call to its return: the exchange itself, and waiting for slower ranks.
    pub time: Duration,
}

/// This rank's connection with the others, and the rows that are exchanged.
#[derive(Debug)]
pub(crate) struct Ranks {
    pub(super) exchange: Exchange,
    /// Gathered rows, one tensor for each width.
    whole: Vec<Tensor>,
    /// Norms of gathered rows, one tensor for each width.
    normed: Vec<Tensor>,
    /// This rank's part of a product's rows, one tensor for each width.
    parts: Vec<Tensor>,
    /// Threads of the other ranks, if they are in the process of rank 0.
    pub(super) followers: Vec<JoinHandle<()>>,
}

/// Exchanges rows between backends, through the host's memory.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) communicator: Box<dyn Communicator>,
    pub(super) sharing: Sharing,
    stats: GatherStats,
    /// Whether a step has begun and not ended: it panicked, and the ranks are no longer at the same operation.
    pub(super) is_in_step: bool,
    /// The part that is sent and the parts that are received, as bytes and as values.
    sent: Vec<u8>,
    received: Vec<u8>,
    values: Vec<f32>,
    lens: Vec<usize>,
}

impl Ranks {
    pub(crate) fn new(communicator: Box<dyn Communicator>, sharing: Sharing) -> Ranks {
        let exchange = Exchange {
            communicator,
            sharing,
            stats: GatherStats::default(),
            is_in_step: false,
            sent: Vec::new(),
            received: Vec::new(),
            values: Vec::new(),
            lens: Vec::new(),
        };
        Ranks { exchange, whole: Vec::new(), normed: Vec::new(), parts: Vec::new(), followers: Vec::new() }
    }

    pub(crate) fn stats(&self) -> GatherStats {
        self.exchange.stats
    }

    /// Computes this rank's columns of a product and gathers those of all ranks into `out`.
    pub(crate) fn linear(
        &mut self,
        backend: &dyn Backend,
        x: Input<'_>,
        map: (&Linear, Columns),
        out: &mut Tensor,
    ) -> Result<(), Error> {
        self.exchange.linear(backend, x, map, (&mut self.parts, out))
    }

    /// Gathers rows of which each rank has some columns, normalises each group of `group_len` values, and applies a map
    /// to the result like [`project`].
    pub(crate) fn project_normed(
        &mut self,
        backend: &dyn Backend,
        (x, columns): (&Tensor, Columns),
        (norm, group_len): (RmsNorm<'_>, usize),
        map: &Linear,
        out: Output<'_>,
    ) -> Result<(), Error> {
        let Ranks { exchange, whole, normed, parts, .. } = self;
        let whole = of_width(whole, backend, map.weight.cols(), x.rows())?;
        let normed = of_width(normed, backend, map.weight.cols(), x.rows())?;
        // The norm reads values that are not rounded.
        exchange.gather(backend, x, (columns, None), whole)?;
        backend.grouped_rms_norm(whole, norm, group_len, normed)?;
        exchange.linear(backend, Input::Rows(normed), (map, Columns::Hidden), (parts, out.rows()))
    }

    /// Normalises rows of which each rank has some columns, over the columns of all ranks. Writes those of this rank to
    /// `out`.
    pub(crate) fn rms_norm(
        &mut self,
        backend: &dyn Backend,
        (x, columns): (&Tensor, Columns),
        RmsNorm { weight, eps }: RmsNorm<'_>,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        let Ranks { exchange, whole, normed, .. } = self;
        let whole = of_width(whole, backend, weight.len(), x.rows())?;
        let normed = of_width(normed, backend, weight.len(), x.rows())?;
        exchange.gather(backend, x, (columns, None), whole)?;
        backend.rms_norm(whole, weight, eps, normed)?;
        exchange.select(backend, normed, columns, out)
    }

    /// Writes the weighted sums of selected experts: [`Backend::expert_mlp`], with a gather after each half.
    pub(crate) fn expert_mlp(
        &mut self,
        backend: &dyn Backend,
        experts: &ExpertMlp<'_>,
        out: Output<'_>,
    ) -> Result<(), Error> {
        let rounding = common_rounding(backend, experts.experts.iter().map(|expert| &expert.down));
        let gates = |part: &mut Tensor| backend.expert_gates(experts, part);
        let sums = |gated: &Tensor, part: &mut Tensor| backend.expert_sums(experts, gated, part);
        self.experts(backend, (experts.routing, rounding), gates, sums, out)
    }

    /// [`Backend::plain_expert_mlp`], with a gather after each half.
    pub(crate) fn plain_expert_mlp(
        &mut self,
        backend: &dyn Backend,
        experts: &ExpertMlp<'_, PlainMlp>,
        out: Output<'_>,
    ) -> Result<(), Error> {
        let rounding = common_rounding(backend, experts.experts.iter().map(|expert| &expert.down));
        let activations = |part: &mut Tensor| backend.plain_expert_activations(experts, part);
        let sums = |active: &Tensor, part: &mut Tensor| backend.plain_expert_sums(experts, active, part);
        self.experts(backend, (experts.routing, rounding), activations, sums, out)
    }

    /// Computes this rank's columns of both halves of selected experts, and gathers those of all ranks.
    fn experts(
        &mut self,
        backend: &dyn Backend,
        (routing, rounding): (Routing, Option<RoundedGroups>),
        first_half: impl Fn(&mut Tensor) -> Result<(), Error>,
        second_half: impl Fn(&Tensor, &mut Tensor) -> Result<(), Error>,
        out: Output<'_>,
    ) -> Result<(), Error> {
        let Ranks { exchange, whole, parts, .. } = self;
        let (sharing, out) = (&exchange.sharing, out.rows());
        let num_rows = out.rows() * routing.num_selected;
        let (own, all) = (sharing.num_own(Columns::Expert), sharing.shares(Columns::Expert).total());
        let own_outputs = sharing.num_own(Columns::ExpertOutput);
        let part = of_width(parts, backend, own, num_rows)?;
        first_half(part)?;
        let gated = of_width(whole, backend, all, num_rows)?;
        exchange.gather(backend, part, (Columns::Expert, rounding), gated)?;
        let part = of_width(parts, backend, own_outputs, out.rows())?;
        second_half(gated, part)?;
        exchange.gather(backend, part, (Columns::ExpertOutput, None), out)
    }
}

/// Applies a map to rows of which each rank has some columns, and writes the result to `out`, which is whole on every
/// rank: gathers the rows, computes this rank's columns of the product and gathers those of all ranks. Without other
/// ranks, the rows are whole.
pub(crate) fn project(
    backend: &dyn Backend,
    ranks: Option<&mut Ranks>,
    (x, columns): (&Tensor, Columns),
    map: &Linear,
    out: Output<'_>,
) -> Result<(), Error> {
    let Some(Ranks { exchange, whole, parts, .. }) = ranks else { return backend.linear_to(x, map, out) };
    let rows = of_width(whole, backend, map.weight.cols(), x.rows())?;
    exchange.gather(backend, x, (columns, backend.input_rounding(map)), rows)?;
    exchange.linear(backend, Input::Rows(rows), (map, Columns::Hidden), (parts, out.rows()))
}

/// Returns how the last maps of experts round their inputs; `None` if they do not all do it alike.
fn common_rounding<'a>(backend: &dyn Backend, maps: impl Iterator<Item = &'a Linear>) -> Option<RoundedGroups> {
    let mut all = maps.map(|map| backend.input_rounding(map));
    let first = all.next()?;
    all.all(|rounding| rounding == first).then_some(first)?
}

/// Returns the tensor of this width with `rows` rows, and allocates it on first use.
fn of_width<'a>(
    tensors: &'a mut Vec<Tensor>,
    backend: &dyn Backend,
    width: usize,
    rows: usize,
) -> Result<&'a mut Tensor, Error> {
    let index = match tensors.iter().position(|tensor| tensor.cols() == width) {
        Some(index) => index,
        None => {
            tensors.push(backend.zeros(backend.activation_dtype(), 0, width)?);
            tensors.len() - 1
        }
    };
    backend.resize_rows(&mut tensors[index], rows)?;
    Ok(&mut tensors[index])
}

impl Exchange {
    /// Computes this rank's columns of a product in a tensor of `parts`, and gathers those of all ranks into `out`.
    fn linear(
        &mut self,
        backend: &dyn Backend,
        x: Input<'_>,
        (linear, columns): (&Linear, Columns),
        (parts, out): (&mut Vec<Tensor>, &mut Tensor),
    ) -> Result<(), Error> {
        let part = of_width(parts, backend, linear.weight.rows(), out.rows())?;
        backend.linears(x, &mut [(linear, &mut *part)])?;
        self.gather(backend, part, (columns, None), out)
    }

    /// Copies this rank's columns of whole rows.
    fn select(
        &mut self,
        backend: &dyn Backend,
        whole: &Tensor,
        columns: Columns,
        part: &mut Tensor,
    ) -> Result<(), Error> {
        let Exchange { sharing, values, .. } = self;
        let own = sharing.shares(columns).of(sharing.rank());
        values.resize(values.len().max(whole.len() + part.len()), 0.0);
        let (all, rest) = values.split_at_mut(whole.len());
        backend.read(whole, all)?;
        let selected = all.chunks_exact(whole.cols()).flat_map(|row| own.iter().flat_map(|range| &row[range.clone()]));
        let part_values = &mut rest[..part.len()];
        part_values.iter_mut().zip(selected).for_each(|(to, from)| *to = *from);
        backend.write(part_values, part)
    }

    /// Joins the columns that each rank has of the same rows. With `rounding`, `whole` is for a product that rounds its
    /// inputs: it gets values that are rounded alike.
    fn gather(
        &mut self,
        backend: &dyn Backend,
        part: &Tensor,
        (columns, rounding): (Columns, Option<RoundedGroups>),
        whole: &mut Tensor,
    ) -> Result<(), Error> {
        let (num_rows, width) = (part.rows(), whole.cols());
        let Exchange { communicator, sharing, stats, sent, received, values, lens, .. } = self;
        let shares = sharing.shares(columns);
        assert_eq!(part.cols(), shares.num_columns(sharing.rank()), "this rank's part of {columns:?}");
        assert_eq!((whole.rows(), width), (num_rows, shares.total()), "the whole of {columns:?}");
        let ranks = 0..sharing.num_ranks();
        let form = match rounding.filter(|groups| shares.are_groups_of(groups.len)) {
            Some(groups) => Form::Rounded(groups),
            None => Form::Floats,
        };
        let started = Instant::now();
        values.resize(values.len().max(num_rows * width), 0.0);
        let values = &mut values[..num_rows * width];
        let own = &mut values[..part.len()];
        backend.read(part, own)?;
        sent.resize(form.encoded_len(part.len()), 0);
        form.encode(own, sent);
        lens.clear();
        lens.extend(ranks.clone().map(|rank| form.encoded_len(num_rows * shares.num_columns(rank))));
        received.resize(lens.iter().sum(), 0);
        communicator.all_gather(sent, lens, received)?;
        let mut rest = &received[..];
        for rank in ranks {
            for to in values.chunks_exact_mut(width) {
                for range in shares.of(rank) {
                    let (from, others) = rest.split_at(form.encoded_len(range.len()));
                    form.decode(from, &mut to[range.clone()]);
                    rest = others;
                }
            }
        }
        backend.write(values, whole)?;
        stats.num_gathers += 1;
        stats.bytes += received.len() as u64;
        stats.time += started.elapsed();
        Ok(())
    }
}

/// The bytes of exchanged values.
#[derive(Clone, Copy)]
enum Form {
    Floats,
    /// Each rank has whole groups.
    Rounded(RoundedGroups),
}

impl Form {
    fn encoded_len(self, num_values: usize) -> usize {
        match self {
            Form::Floats => num_values * size_of::<f32>(),
            Form::Rounded(groups) => groups.encoded_len(num_values),
        }
    }

    fn encode(self, values: &[f32], bytes: &mut [u8]) {
        match self {
            Form::Floats => {
                let (bytes, _) = bytes.as_chunks_mut::<{ size_of::<f32>() }>();
                bytes.iter_mut().zip(values).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
            }
            Form::Rounded(groups) => groups.encode(values, bytes),
        }
    }

    fn decode(self, bytes: &[u8], values: &mut [f32]) {
        match self {
            Form::Floats => {
                let (bytes, _) = bytes.as_chunks::<{ size_of::<f32>() }>();
                values.iter_mut().zip(bytes).for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
            }
            Form::Rounded(groups) => groups.decode(bytes, values),
        }
    }
}
