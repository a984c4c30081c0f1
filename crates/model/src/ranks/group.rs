//! Loading a model on ranks: on one of them, and on all that are groups of threads of one process.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pellucid_checkpoint::Checkpoint;
use pellucid_tensor::{Backend, Communicator, Error as DeviceError, InProcess, Patience};

use super::{RankIdentity, Ranks, Sharing};
use crate::decoder::blueprint;
use crate::{Decoder, Error, LoadOptions};

/// One rank of a group: the model that it reads, its backend, and its connection with the others.
#[derive(Debug)]
pub struct GroupMember<'a> {
    pub checkpoint: &'a Checkpoint,
    pub backend: Arc<dyn Backend>,
    pub communicator: Box<dyn Communicator>,
}

impl<'a> GroupMember<'a> {
    /// Returns one member for each backend. An operation in which a rank does not take part within `time_limit` fails.
    pub fn of(
        checkpoint: &'a Checkpoint,
        backends: impl IntoIterator<Item = Arc<dyn Backend>>,
        time_limit: Duration,
    ) -> Vec<GroupMember<'a>> {
        let backends: Vec<_> = backends.into_iter().collect();
        let group = InProcess::group(backends.len(), time_limit);
        let member = |(backend, rank)| GroupMember { checkpoint, backend, communicator: Box::new(rank) as Box<_> };
        backends.into_iter().zip(group).map(member).collect()
    }
}

impl Decoder {
    /// Loads the share of one of several ranks, which all call it. Fails on every rank if one of them has another
    /// build, arithmetic or model: `identity` starts with the build.
    pub fn load_on_rank(
        checkpoint: &Checkpoint,
        backend: Arc<dyn Backend>,
        options: LoadOptions,
        mut communicator: Box<dyn Communicator>,
        identity: RankIdentity,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Decoder, Error> {
        let blueprint = blueprint(checkpoint, options)?;
        let (rank, num_ranks) = (communicator.rank(), communicator.num_ranks());
        if num_ranks == 1 {
            return Decoder::load(checkpoint, backend, options, progress);
        }
        let sharing = Sharing::new(&blueprint, rank, num_ranks)?;
        let identity = identity.with_model(checkpoint, &*backend, &blueprint.config);
        let loaded = identity.compare(&mut *communicator).and_then(|()| {
            let decoder = Decoder::load_shares(checkpoint, backend.into(), blueprint, sharing.clone(), progress)?;
            // Ranks load at different speeds.
            communicator.barrier(Patience::Idle)?;
            Ok(decoder)
        });
        match loaded {
            Ok(mut decoder) => {
                decoder.join_ranks(Ranks::new(communicator, sharing));
                Ok(decoder)
            }
            Err(error) => {
                communicator.abort(&error.to_string());
                Err(error)
            }
        }
    }

    /// Loads a model on ranks of this process and returns the decoder of rank 0. Each of the others follows it on a
    /// thread, which ends when that decoder is dropped.
    pub fn load_group(
        members: Vec<GroupMember<'_>>,
        options: LoadOptions,
        identity: &RankIdentity,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Decoder, Error> {
        let load = |member: GroupMember<'_>, progress: &mut dyn FnMut(usize, usize)| {
            let GroupMember { checkpoint, backend, communicator } = member;
            Decoder::load_on_rank(checkpoint, backend, options, communicator, identity.clone(), progress)
        };
        let mut members = members.into_iter();
        let first = members.next().expect("a group has a rank 0");
        let (first, others) = thread::scope(|scope| {
            let others: Vec<_> = members.map(|member| scope.spawn(move || load(member, &mut |_, _| ()))).collect();
            let first = load(first, progress);
            let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().expect("loading does not panic");
            (first, others.into_iter().map(join).collect::<Vec<Result<Decoder, Error>>>())
        });
        let mut decoders = Vec::new();
        let mut failure = None;
        for loaded in std::iter::once(first).chain(others) {
            match loaded {
                Ok(decoder) => decoders.push(decoder),
                // The cause rather than its consequences on other ranks.
                Err(error) if failure.is_none() || !is_lost(&error) => failure = Some(error),
                Err(_) => {}
            }
        }
        if let Some(error) = failure {
            return Err(error);
        }
        let mut decoders = decoders.into_iter();
        let mut first = decoders.next().expect("rank 0 was loaded");
        let followers: Vec<JoinHandle<()>> = decoders.enumerate().map(|(i, decoder)| follow(i + 1, decoder)).collect();
        if let Some(ranks) = first.ranks_mut() {
            ranks.followers = followers;
        }
        Ok(first)
    }
}

/// Starts the thread of a rank. An error reaches rank 0 through the communicator.
fn follow(rank: usize, mut decoder: Decoder) -> JoinHandle<()> {
    let work = move || drop(decoder.follow());
    thread::Builder::new().name(format!("rank-{rank}")).spawn(work).expect("the system starts a thread for each rank")
}

fn is_lost(error: &Error) -> bool {
    matches!(error, Error::Device(DeviceError::Lost { .. }))
}
