//! Idle connections: what each costs the server in memory. Each asks once and then stays.

use super::server::{Outcome, metric};
use super::{Arguments, Server};

/// What the issue of the server allows each connection, in bytes.
const ALLOWED: f64 = 20.0 * 1024.0;

pub(crate) fn run(arguments: &Arguments) -> Outcome<()> {
    let count = arguments.connections;
    let server =
        Server::start(arguments, &["--header-timeout", "3600", "--max-connections", &(count + 16).to_string()])?;
    let mut watcher = server.client()?;
    // Some connections bring what is shared by all to life.
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
        "{open} connections are open; each of {count} idle ones takes {:.1} KiB of the server's memory",
        each / 1024.0
    );
    if open < count as f64 {
        return Err("connections were closed".into());
    }
    if each > ALLOWED {
        return Err(format!("more than {} KiB", ALLOWED / 1024.0).into());
    }
    // The server still answers, and those who waited longest are still served.
    clients[0].get("/v1/models")?;
    Ok(())
}
