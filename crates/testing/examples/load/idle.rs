//! Idle connections: the server's memory per connection. Each connection sends one request and then stays open.

use super::server::{Outcome, metric};
use super::{Arguments, Server};

/// Maximum bytes of memory per connection.
const MAX_BYTES: f64 = 20.0 * 1024.0;

pub(crate) fn run(arguments: &Arguments) -> Outcome<()> {
    let count = arguments.connections;
    let server =
        Server::start(arguments, &["--header-timeout", "3600", "--max-connections", &(count + 16).to_string()])?;
    let mut watcher = server.client()?;
    // Warm up: the first connections allocate memory that all share.
    let mut clients = Vec::with_capacity(count);
    for _ in 0..64 {
        server.client()?.get("/health")?;
    }
    let before = server.resident_bytes()?;
    for i in 0..count {
        let mut client = server.client().map_err(|error| format!("connection {i}: {error}; see ulimit -n"))?;
        let reply = client.get("/health").map_err(|error| format!("connection {i}: {error}; see ulimit -n"))?;
        if reply.status != 200 {
            return Err(format!("connection {i}: {}", reply.status).into());
        }
        clients.push(client);
    }
    let each = server.resident_bytes()?.saturating_sub(before) as f64 / count as f64;
    let open = metric(&mut watcher, "pellucid_connections")?;
    println!(
        "{open} connections are open; each of {count} idle connections takes {:.1} KiB of the server's memory",
        each / 1024.0
    );
    if open < count as f64 {
        return Err(format!("the server closed connections: {open} of {count} are open").into());
    }
    if each > MAX_BYTES {
        return Err(format!("a connection takes more than {} KiB", MAX_BYTES / 1024.0).into());
    }
    // The oldest connection still works.
    clients[0].get("/v1/models")?;
    Ok(())
}
