//! The limit of open files, which bounds the number of connections.

use super::connections::Bounds;

/// Descriptors that are kept free for the log, model files, reloaded files and the system's own needs.
const RESERVE: usize = 32;
/// Maximum connections beyond the bound that are answered with a refusal; see `connection::connections`.
const MAX_REFUSING: usize = 64;

/// Raises the limit of open files as far as this process may, and bounds the connections below it. If fewer than
/// `max_connections` fit, the log says so.
pub(crate) fn connection_bounds(max_connections: usize) -> Bounds {
    let limit = raise_limit();
    let bounds = bounds(max_connections, limit, num_open());
    if bounds.max_open < max_connections {
        tracing::warn!(
            max_connections,
            open_files = limit,
            connections = bounds.max_open,
            "--max-connections does not fit into the limit of open files: {} connections instead of {max_connections}; \
             raise the limit (ulimit -n, LimitNOFILE) above {}",
            bounds.max_open,
            max_connections + MAX_REFUSING + RESERVE + num_open()
        );
    }
    bounds
}

/// Divides the descriptors that `num_open` files and the reserve leave of `limit`.
fn bounds(max_connections: usize, limit: usize, num_open: usize) -> Bounds {
    let available = limit.saturating_sub(num_open + RESERVE);
    let max_refusing = (available / 8).clamp(1, MAX_REFUSING);
    Bounds { max_open: max_connections.min(available.saturating_sub(max_refusing)).max(1), max_refusing }
}

/// Sets the soft limit to the hard limit and returns it.
#[cfg(unix)]
fn raise_limit() -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let amount = |limit: Option<u64>| limit.map_or(usize::MAX, |limit| limit as usize);
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => amount(maximum),
        Err(error) => {
            tracing::warn!(%error, limit = current, "the limit of open files cannot be raised");
            amount(current)
        }
    }
}

#[cfg(not(unix))]
fn raise_limit() -> usize {
    usize::MAX
}

/// Number of files that are open now.
fn num_open() -> usize {
    // Systems without this folder have the reserve only.
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_descriptors_for_files() {
        for limit in [0, 1, 40, 64, 128, 1024, 20_000, usize::MAX] {
            let Bounds { max_open, max_refusing } = bounds(16_384, limit, 20);
            assert!(max_open >= 1 && max_refusing >= 1);
            if limit > 60 {
                assert!(max_open + max_refusing + 20 + RESERVE <= limit, "{max_open} of {limit}");
            }
        }
        assert_eq!(bounds(16_384, 1 << 20, 20).max_open, 16_384);
        assert_eq!(bounds(16_384, 128, 16).max_open, 70);
    }

    #[cfg(unix)]
    #[test]
    fn the_soft_limit_becomes_the_hard_limit() {
        let limit = raise_limit();
        let now = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        assert_eq!(now.current, now.maximum);
        assert_eq!(limit, now.maximum.map_or(usize::MAX, |limit| limit as usize));
    }
}
