//! Opens the page in the user's browser, for `serve --open` and `pellucid open`.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::thread;

use tracing::info;

/// Programs that open an address in the user's browser, in the order in which they are tried.
const OPENERS: &[&str] = if cfg!(target_os = "macos") { &["open"] } else { &["xdg-open", "wslview"] };

/// Returns the address of the page for a browser on this machine.
pub(super) fn page_url(scheme: &str, address: SocketAddr) -> String {
    match address.ip().is_unspecified() {
        true => format!("{scheme}://localhost:{}/", address.port()),
        false => format!("{scheme}://{address}/"),
    }
}

/// Opens the page. Starting a browser may take longer than the first request, so nothing waits for it; if there is
/// none, the log says where the page is.
pub(super) fn open(url: String) {
    info!("opening {url} in the browser");
    let wait = move || {
        let is_open = OPENERS.iter().any(|program| {
            // A browser for terminals must not read from or write to this one.
            let command = Command::new(program)
                .arg(&url)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
            command.is_ok_and(|status| status.success())
        });
        if !is_open {
            info!("no browser could be opened; the page is at {url}");
        }
    };
    // Without a thread the page is not opened, and the log has its address.
    let _ = thread::Builder::new().name("browser".into()).spawn(wait);
}
