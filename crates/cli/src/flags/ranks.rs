//! The flags that choose ranks, and how this process joins them.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow};
use pellucid::{DeviceOptions, Ranks};
use pellucid_mpi::{MpiOptions, World};
use pellucid_tensor::{Communicator as _, Patience};

use crate::commands::serve::fingerprint;
use crate::flags::usage_error::UsageError;
use crate::terminal::log;

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Computing")]
pub(crate) struct RankArgs {
    /// Compute with several ranks, each with a share of the rows of
    /// every weight; replies have the same bytes: N groups of this
    /// process's threads, or mpi for the processes of mpiexec
    #[arg(long, verbatim_doc_comment, value_name = "N|mpi")]
    ranks: Option<RankChoice>,

    /// Seconds in which every rank of mpiexec must take part in a step;
    /// otherwise the job ends
    #[arg(
        long,
        verbatim_doc_comment,
        value_name = "SECONDS",
        default_value_t = 20,
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    rank_timeout: u16,

    /// MPI library to open [default: libmpi_abi.so.1 of the system]
    #[arg(long, value_name = "FILE")]
    mpi_library: Option<PathBuf>,

    #[arg(skip)]
    joined: Arc<Mutex<Option<Joined>>>,
}

/// The ranks of `--ranks`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RankChoice {
    /// Groups of threads of this process.
    Threads(NonZeroUsize),
    /// The processes that `mpiexec` started.
    Mpi,
}

/// Maximum number of groups of threads.
const MAX_GROUPS: usize = 64;

impl FromStr for RankChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "mpi" {
            return Ok(RankChoice::Mpi);
        }
        let number = text.parse().ok().filter(|number: &NonZeroUsize| number.get() <= MAX_GROUPS);
        number.map(RankChoice::Threads).ok_or_else(|| format!("expected mpi, or a number from 1 to {MAX_GROUPS}"))
    }
}

/// The ranks of this process, once it has joined them.
#[derive(Debug)]
struct Joined {
    /// Taken by the model that they compute.
    ranks: Option<Ranks>,
    /// Processes of `mpiexec` on this machine, which share its threads.
    num_local: NonZeroUsize,
}

impl RankArgs {
    /// Returns the device of this process: ranks on one machine share its threads.
    pub(crate) fn device(&self, device: DeviceOptions) -> Result<DeviceOptions> {
        let joined = self.joined()?;
        let joined = joined.as_ref().expect("just joined");
        match self.ranks {
            Some(RankChoice::Mpi) if device.threads.is_none() => Ok(device.shared_by(joined.num_local)),
            Some(RankChoice::Threads(number)) => Ok(device.shared_by(number)),
            _ => Ok(device),
        }
    }

    /// Joins the ranks, and returns whether this process follows another, which has the engine and reports.
    pub(crate) fn follows(&self) -> Result<bool> {
        Ok(self.joined()?.as_ref().expect("just joined").ranks.as_ref().is_some_and(Ranks::follows))
    }

    /// Returns the ranks for a model. Several ranks compute one model.
    pub(crate) fn take(&self) -> Result<Ranks> {
        if self.ranks.is_none() {
            return Ok(Ranks::One);
        }
        let ranks = self.joined()?.as_mut().expect("just joined").ranks.take();
        ranks.ok_or_else(|| UsageError::because("--ranks: a second model cannot be computed by several ranks"))
    }

    /// Joins the ranks, unless this process has. A process of `mpiexec` can do so once.
    fn joined(&self) -> Result<MutexGuard<'_, Option<Joined>>> {
        let mut joined = self.joined.lock().unwrap_or_else(PoisonError::into_inner);
        if joined.is_none() {
            let (ranks, num_local) = match self.ranks {
                None => (Ranks::One, NonZeroUsize::MIN),
                Some(RankChoice::Threads(number)) => (Ranks::Threads(number), NonZeroUsize::MIN),
                Some(RankChoice::Mpi) => self.join_mpi()?,
            };
            *joined = Some(Joined { ranks: Some(ranks), num_local });
        }
        Ok(joined)
    }

    fn join_mpi(&self) -> Result<(Ranks, NonZeroUsize)> {
        let world = World::open(MpiOptions {
            library: self.mpi_library.as_ref().map(|path| path.display().to_string()),
            time_limit: Duration::from_secs(self.rank_timeout.into()),
            report: Box::new(|reason: &str| {
                log::error(&format!("ranks: {reason}"));
                // The process ends next, and does not return to `main`.
                log::finish();
            }),
        });
        let mut world = world.map_err(|error| anyhow!(error).context("--ranks mpi"))?;
        let num_local = num_local(&mut world).context("--ranks mpi")?;
        if world.rank() == 0 {
            log::note(&format!("ranks: {} with {}, {num_local} on this machine", world.num_ranks(), world.version()));
        } else {
            log::silence_notes();
        }
        Ok((Ranks::Process { communicator: Box::new(world), build: fingerprint::build() }, num_local))
    }

    /// Refuses several ranks for a command that has none.
    pub(crate) fn refuse(&self, command: &str) -> Result<()> {
        match self.ranks {
            None => Ok(()),
            Some(_) => Err(UsageError::because(format!("--ranks: {command} computes on one rank"))),
        }
    }
}

/// Returns the number of ranks on the machine of this one.
fn num_local(world: &mut World) -> Result<NonZeroUsize, pellucid_tensor::Error> {
    // The id of the running system is one for all network namespaces and containers of a machine.
    const LEN: usize = 64;
    let mut own = [0; LEN];
    let id = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    own.iter_mut().zip(&id).for_each(|(own, byte)| *own = *byte);
    let mut all = vec![0; LEN * world.num_ranks()];
    world.barrier(Patience::Idle)?;
    world.all_gather(&own, &vec![LEN; world.num_ranks()], &mut all)?;
    let count = all.chunks_exact(LEN).filter(|id| **id == own).count();
    Ok(NonZeroUsize::new(count).expect("this rank is on its machine"))
}

/// Returns whether an error only says that a rank ended with rank 0, which is no failure.
pub(crate) fn is_end(error: &Error) -> bool {
    error.chain().any(|cause| matches!(cause.downcast_ref(), Some(pellucid::Error::RankEnded { .. })))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        ranks: RankArgs,
    }

    /// A benchmark or a proof with a draft model loads two.
    #[test]
    fn only_several_ranks_refuse_a_second_model() {
        let one = Flags::parse_from(["pellucid"]).ranks;
        assert!(matches!((one.take(), one.take()), (Ok(Ranks::One), Ok(Ranks::One))));
        let two = Flags::parse_from(["pellucid", "--ranks", "2"]).ranks;
        assert!(matches!(two.take(), Ok(Ranks::Threads(_))));
        assert!(two.take().unwrap_err().to_string().contains("a second model"));
    }
}
