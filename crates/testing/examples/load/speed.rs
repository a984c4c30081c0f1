//! The cost of HTTP: throughput of streams compared with `pellucid bench`, which runs the same engine without a server,
//! and the time that HTTP adds to the first token.

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::requests::Random;
use super::server::{MODEL, Outcome};
use super::{Arguments, Server};

/// Requests per client and round, the same as in `bench`.
const REQUESTS_EACH: usize = 4;
/// Ids that the vocabulary of every published model has.
const IDS: std::ops::Range<usize> = 100..30_000;

pub(crate) fn run(arguments: &Arguments) -> Outcome<()> {
    let model = arguments.model.as_deref().ok_or("speed needs --model: the tiny model is too fast to measure")?;
    let mut ratios = Vec::new();
    let mut added = Vec::new();
    for round in 0..arguments.rounds {
        let engine = bench(arguments, model)?;
        let server = Server::start(arguments, &["--max-sequences", &arguments.clients.to_string()])?;
        let served = streams(&server, arguments, round)?;
        added.extend(first_tokens(&server, arguments, round)?);
        ratios.push(served / engine);
        println!("round {round}: engine {engine:.1} tokens/s, HTTP {served:.1}: {:.1} %", 100.0 * served / engine);
    }
    ratios.sort_by(f64::total_cmp);
    added.sort();
    println!(
        "{} streams of {} + {} tokens: HTTP gives {:.1} % of the engine's tokens/s (median of {} rounds)",
        arguments.clients,
        arguments.input,
        arguments.output,
        100.0 * ratios[ratios.len() / 2],
        ratios.len()
    );
    println!(
        "HTTP adds p50 {:.3} ms, p90 {:.3} ms to the time to first token ({} requests, one at a time)",
        percentile(&added, 0.5),
        percentile(&added, 0.9),
        added.len()
    );
    Ok(())
}

/// Returns the percentile of sorted times, in milliseconds.
pub(crate) fn percentile(sorted: &[Duration], fraction: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * fraction).round() as usize).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
}

/// Measures output tokens per second of the engine without HTTP.
fn bench(arguments: &Arguments, model: &str) -> Outcome<f64> {
    let (clients, input, output) =
        (arguments.clients.to_string(), arguments.input.to_string(), arguments.output.to_string());
    let ran = Command::new(&arguments.pellucid)
        .args(["bench", model, "--json", "--concurrency", &clients, "--input", &input, "--output", &output])
        .output()?;
    let result: Value =
        serde_json::from_slice(&ran.stdout).map_err(|_| String::from_utf8_lossy(&ran.stderr).into_owned())?;
    Ok(result["serving"][0]["output_tokens_per_second"].as_f64().ok_or("bench printed no output_tokens_per_second")?)
}

/// Returns a request for a stream; each seed gives a different prompt.
fn body(arguments: &Arguments, seed: u64, output: usize) -> Vec<u8> {
    let mut random = Random::new(seed + 1);
    let ids: Vec<usize> = (0..arguments.input).map(|_| IDS.start + random.below(IDS.len())).collect();
    let body = json!({ "model": MODEL, "prompt": ids, "max_tokens": output, "ignore_eos": true, "temperature": 0,
                       "stream": true, "stream_options": { "include_usage": true } });
    body.to_string().into_bytes()
}

/// Measures output tokens per second of streams over HTTP.
fn streams(server: &Server, arguments: &Arguments, round: usize) -> Outcome<f64> {
    let (next, tokens) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let count = REQUESTS_EACH * arguments.clients;
    let started = Instant::now();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..arguments.clients)
            .map(|_| {
                scope.spawn(|| -> Outcome<()> {
                    let mut client = server.client()?;
                    loop {
                        let i = next.fetch_add(1, Ordering::Relaxed);
                        if i >= count {
                            return Ok(());
                        }
                        let body = body(arguments, (round * count + i) as u64, arguments.output);
                        let reply = client.post("/v1/completions", &body)?;
                        tokens.fetch_add(
                            usage_chunk(&reply.body)?["usage"]["completion_tokens"].as_u64().unwrap_or(0) as usize,
                            Ordering::Relaxed,
                        );
                    }
                })
            })
            .collect();
        clients.into_iter().try_for_each(|client| client.join().map_err(|_| "a client panicked")?)
    })?;
    Ok(tokens.into_inner() as f64 / started.elapsed().as_secs_f64())
}

/// Returns the chunk with usage and timings: the second to last event of a stream.
fn usage_chunk(body: &str) -> Outcome<Value> {
    let event = body.trim_end().rsplit("\n\n").nth(1).and_then(|event| event.strip_prefix("data: "));
    Ok(serde_json::from_str(event.ok_or_else(|| format!("not a stream: {body}"))?)?)
}

/// Measures, one request at a time, the client's time to first token minus the engine's.
fn first_tokens(server: &Server, arguments: &Arguments, round: usize) -> Outcome<Vec<Duration>> {
    let mut client = server.client()?;
    let mut added = Vec::new();
    for i in 0..32 {
        let body = body(arguments, (((round + 1) << 32) | i) as u64, 2);
        let asked = Instant::now();
        let mut first = None;
        let reply = client.ask("POST", "/v1/completions", &body, &mut |_| {
            first.get_or_insert_with(|| asked.elapsed());
            true
        })?;
        let engine_ms = usage_chunk(&reply.body)?["pellucid"]["timings"]["time_to_first_token_ms"].as_f64();
        let engine_ms = engine_ms.ok_or("a reply without timings")?;
        let first = first.ok_or("a stream without events")?;
        added.push(first.saturating_sub(Duration::from_secs_f64(engine_ms / 1e3)));
    }
    Ok(added)
}
