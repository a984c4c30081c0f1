//! A web server that streams stories: `POST /` with a prompt as the body, text as it is generated as the reply.
//!
//! `cargo run -p pellucid --example axum_app [MODEL]`, then `curl -N -d "Once upon a time" http://127.0.0.1:3000`.
//! With `--once` it takes a free port, sends itself one request and ends.
//!
//! A client that disconnects drops the stream of its reply, which cancels the request.

use std::error::Error;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures_util::StreamExt;
use pellucid::{Pellucid, Request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The tiny model of this crate, which writes stories for small children.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tiny.gguf");

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (flags, paths): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|one| one.starts_with("--"));
    let is_once = flags.iter().any(|flag| flag == "--once");
    let path = paths.into_iter().next().unwrap_or_else(|| TINY.to_owned());
    // Loading takes seconds for a large model, so it does not belong on a thread of the runtime.
    let model = tokio::task::spawn_blocking(move || Pellucid::open(path)).await??;

    let app = Router::new().route("/", post(continue_story)).with_state(model);
    let listener = TcpListener::bind(if is_once { "127.0.0.1:0" } else { "127.0.0.1:3000" }).await?;
    let address = listener.local_addr()?;
    println!("listening at http://{address}");
    let server = tokio::spawn(async move { axum::serve(listener, app).await });
    if !is_once {
        server.await??;
        return Ok(());
    }

    let mut client = TcpStream::connect(address).await?;
    let prompt = "Once upon a time";
    let head = format!("POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", prompt.len());
    client.write_all((head + prompt).as_bytes()).await?;
    let mut reply = String::new();
    client.read_to_string(&mut reply).await?;
    println!("{reply}");
    Ok(())
}

async fn continue_story(State(model): State<Pellucid>, prompt: String) -> Response {
    match model.stream_async(Request::text(prompt).temperature(0.7).max_tokens(100)) {
        Ok(pieces) => Body::from_stream(pieces.map(|piece| piece.map(|piece| piece.text))).into_response(),
        // A full queue is the server's problem, everything else is the request's.
        Err(error) if error.is_temporary() => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
        Err(error) => (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
    }
}
