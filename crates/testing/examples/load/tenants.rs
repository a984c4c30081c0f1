//! Two tenants: one sends a stream after the other, alone and while the other tenant misbehaves in each way that a
//! client can. Reports what the first one keeps of its throughput, and its time to the first token.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

use super::Arguments;
use super::client::Client;
use super::server::{MODEL, Outcome, Server, metric, own_seconds};

const QUIET: &str = "key-of-the-quiet-tenant";
const OTHER: &str = "key-of-the-other-tenant";
/// Goal for the throughput beside a misbehaving tenant, relative to that without one. The median time to the first
/// token may double and take a step more.
const GOAL: f64 = 0.45;

/// A way to misbehave: its name, and the work of one of its threads until the flag is set.
type Attack = (&'static str, usize, fn(&Attacker<'_>) -> Outcome<()>);

const ATTACKS: [Attack; 8] = [
    ("fills the queue", 80, |attacker| attacker.complete(&attacker.prompt(20), 64, 1)),
    ("eight long prompts", 8, |attacker| attacker.complete(&attacker.prompt(attacker.long_prompt), 4, 1)),
    ("sixteen long replies", 16, |attacker| attacker.complete(&attacker.prompt(20), 512, 1)),
    ("requests with n = 16", 4, |attacker| attacker.complete(&attacker.prompt(20), 128, 16)),
    ("70 stalled bodies", 70, |attacker| attacker.stall_body()),
    ("/tokenize flood", 16, |attacker| attacker.tokenize()),
    ("WebSocket control flood", 4, |attacker| attacker.flood_controls()),
    ("disconnects in prefill", 16, |attacker| attacker.disconnect()),
];

struct Attacker<'a> {
    address: SocketAddr,
    is_over: &'a AtomicBool,
    /// Words of a long prompt.
    long_prompt: usize,
    num_prompts: &'a AtomicUsize,
}

/// Results of the quiet tenant.
#[derive(Debug, Default)]
struct Served {
    num_tokens: usize,
    num_refused: usize,
    first_token: Vec<Duration>,
    seconds: f64,
    /// Mean seconds of a step of the engine.
    step_seconds: f64,
    /// Cores that the server's threads used, by name, and this program.
    cores: BTreeMap<String, f64>,
}

pub(crate) fn run(arguments: &Arguments) -> Outcome<()> {
    let keys = std::env::temp_dir().join(format!("pellucid-load-keys-{}.toml", std::process::id()));
    let tenant = |name: &str, key: &str| format!("[[tenant]]\nname = \"{name}\"\nkeys = [\"{key}\"]\n");
    // The steps are read from `/metrics`.
    std::fs::write(&keys, tenant("quiet", QUIET) + "metrics = true\n" + &tenant("other", OTHER))?;
    let started = Server::start(arguments, &["--keys-file", &keys.to_string_lossy()]);
    let mut server = started?;
    let outcome = measure_all(&mut server, arguments);
    let _ = std::fs::remove_file(&keys);
    outcome
}

fn measure_all(server: &mut Server, arguments: &Arguments) -> Outcome<()> {
    let time = Duration::from_secs(arguments.seconds);
    let num_prompts = AtomicUsize::new(0);
    // Warm up.
    serve_quiet(server, time / 4, arguments, &num_prompts)?;
    let mut starved = Vec::new();
    println!(
        "| the other tenant | tokens/s | of alone | first token p50, ms | of alone | step, ms | refused | cores used (alone) |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for (name, num_threads, attack) in ATTACKS {
        // The speed of a shared machine changes, so each attack is compared with its own run alone.
        let alone = serve_quiet(server, time, arguments, &num_prompts)?;
        let is_over = AtomicBool::new(false);
        let attacker = Attacker {
            address: server.address,
            is_over: &is_over,
            long_prompt: arguments.input,
            num_prompts: &num_prompts,
        };
        let beside = std::thread::scope(|scope| {
            for _ in 0..num_threads {
                // An attacker that is disconnected or refused goes on; its errors are not those of the test.
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) && attack(&attacker).is_err() {
                        std::thread::yield_now();
                    }
                });
            }
            std::thread::sleep(Duration::from_secs(1));
            let beside = serve_quiet(server, time, arguments, &num_prompts);
            is_over.store(true, Ordering::Relaxed);
            beside
        })?;
        server.check_alive()?;
        let rate = |served: &Served| served.num_tokens as f64 / served.seconds;
        let ratio = rate(&beside) / rate(&alone);
        println!(
            "| {name} | {:.1} of {:.1} | {:.0} % | {:.2} of {:.2} | {:.1} | {:.2} | {} | {} |",
            rate(&beside),
            rate(&alone),
            100.0 * ratio,
            beside.median_ms(),
            alone.median_ms(),
            beside.median_ms() / alone.median_ms(),
            1e3 * beside.step_seconds,
            beside.num_refused,
            beside.cores_text(&alone)
        );
        let is_late = beside.median_ms() > 2.0 * alone.median_ms() + 1e3 * beside.step_seconds;
        if beside.num_tokens == 0 || (arguments.is_strict && (ratio < GOAL || is_late)) {
            starved.push(name);
        }
    }
    match starved.is_empty() {
        true => Ok(()),
        false => Err(format!("the quiet tenant was starved: {}", starved.join(", ")).into()),
    }
}

impl Served {
    /// Returns the cores used by the threads that used any, and in parentheses those of the run alone.
    fn cores_text(&self, alone: &Served) -> String {
        let used = self.cores.iter().filter(|(_, cores)| **cores >= 0.05);
        let text = |(name, cores): (&String, &f64)| {
            format!("{name} {cores:.1} ({:.1})", alone.cores.get(name).copied().unwrap_or(0.0))
        };
        used.map(text).collect::<Vec<_>>().join(", ")
    }

    fn median_ms(&self) -> f64 {
        let mut times = self.first_token.clone();
        times.sort();
        times.get(times.len() / 2).map_or(f64::NAN, |time| 1e3 * time.as_secs_f64())
    }
}

/// Sends streams one after the other for `time`.
fn serve_quiet(server: &Server, time: Duration, arguments: &Arguments, num_prompts: &AtomicUsize) -> Outcome<Served> {
    let mut client = server.client()?.with_key(QUIET);
    let mut served = Served::default();
    let seconds = || -> Outcome<BTreeMap<String, f64>> {
        let mut seconds = server.thread_seconds()?;
        seconds.insert("clients".into(), own_seconds()?);
        Ok(seconds)
    };
    let before = seconds()?;
    let (steps_before, step_seconds_before) = steps(&mut client)?;
    let started = Instant::now();
    while started.elapsed() < time {
        let number = num_prompts.fetch_add(1, Ordering::Relaxed);
        let prompt = format!("{number} a short prompt");
        let body = json!({ "model": MODEL, "prompt": prompt, "max_tokens": arguments.output, "ignore_eos": true,
                           "stream": true, "stream_options": { "include_obfuscation": false } });
        let asked = Instant::now();
        let mut num_tokens = 0;
        let reply = client.ask("POST", "/v1/completions", body.to_string().as_bytes(), &mut |data| {
            if num_tokens == 0 {
                served.first_token.push(asked.elapsed());
            }
            num_tokens += usize::from(data != "[DONE]");
            started.elapsed() < 2 * time
        })?;
        if reply.status == 200 {
            served.num_tokens += num_tokens;
        } else {
            served.num_refused += 1;
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    served.seconds = started.elapsed().as_secs_f64();
    let (num_steps, step_seconds) = steps(&mut client)?;
    served.step_seconds = (step_seconds - step_seconds_before) / (num_steps - steps_before).max(1.0);
    served.cores = seconds()?;
    for (name, used) in &mut served.cores {
        *used = (*used - before.get(name).copied().unwrap_or(0.0)) / served.seconds;
    }
    Ok(served)
}

/// Returns the number of the engine's steps so far, and the seconds that they took.
fn steps(client: &mut Client) -> Outcome<(f64, f64)> {
    let num_steps = metric(client, "pellucid_steps_total")?;
    Ok((num_steps, num_steps * metric(client, "pellucid_step_seconds_mean")?))
}

impl Attacker<'_> {
    /// Returns a prompt of `num_words` words that no other prompt begins with.
    fn prompt(&self, num_words: usize) -> String {
        let number = self.num_prompts.fetch_add(1, Ordering::Relaxed);
        format!("{number}{}", " and".repeat(num_words))
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn client(&self) -> Outcome<Client> {
        Ok(Client::connect(self.address)?.with_key(OTHER))
    }

    /// Sends completions; their streams are closed when the attack is over.
    fn complete(&self, prompt: &str, max_tokens: usize, num_choices: usize) -> Outcome<()> {
        let body = json!({ "model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true,
                           "n": num_choices, "stream": true });
        let reply =
            self.client()?.ask("POST", "/v1/completions", body.to_string().as_bytes(), &mut |_| !self.is_over())?;
        if reply.status != 200 {
            std::thread::sleep(Duration::from_millis(5));
        }
        // The caller repeats what failed.
        Err("again".into())
    }

    /// Opens a request and does not finish its body.
    fn stall_body(&self) -> Outcome<()> {
        let mut stream = TcpStream::connect(self.address)?;
        write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {OTHER}\r\n\
             Content-Type: application/json\r\nContent-Length: 4000000\r\n\r\n"
        )?;
        let spaces = vec![b' '; 64 << 10];
        for _ in 0..60 {
            stream.write_all(&spaces)?;
        }
        while !self.is_over() {
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn tokenize(&self) -> Outcome<()> {
        let body = json!({ "model": MODEL, "prompt": "words of a long text ".repeat(40_000) }).to_string();
        let mut client = self.client()?;
        while !self.is_over() {
            client.post("/tokenize", body.as_bytes())?;
        }
        Ok(())
    }

    /// Starts a long reply over a WebSocket and sends control messages without reading.
    fn flood_controls(&self) -> Outcome<()> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_write_timeout(Some(Duration::from_millis(200)))?;
        write!(
            stream,
            "GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {OTHER}\r\nConnection: Upgrade\r\n\
             Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )?;
        let mut head = [0; 12];
        stream.read_exact(&mut head)?;
        let chat = json!({ "model": MODEL, "messages": [{ "role": "user", "content": self.prompt(20) }],
                           "max_tokens": 512, "ignore_eos": true });
        stream.write_all(&frame(&chat.to_string()))?;
        let update = frame(&json!({ "type": "update", "temperature": 0.5, "logit_bias": {} }).to_string()).repeat(100);
        while !self.is_over() {
            stream.write_all(&update)?;
        }
        Ok(())
    }

    /// Sends long prompts and closes the connection before the first token.
    fn disconnect(&self) -> Outcome<()> {
        let prompt = self.prompt(self.long_prompt);
        let body = json!({ "model": MODEL, "prompt": prompt, "max_tokens": 64, "stream": true }).to_string();
        let mut stream = TcpStream::connect(self.address)?;
        write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {OTHER}\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        std::thread::sleep(Duration::from_millis(100));
        Err("again".into())
    }
}

/// Returns a masked text frame of a WebSocket; the mask is zero.
fn frame(text: &str) -> Vec<u8> {
    let mut frame = vec![0x81];
    match u8::try_from(text.len()) {
        Ok(length) if length < 126 => frame.push(0x80 | length),
        _ => {
            frame.push(0x80 | 126);
            frame.extend((text.len() as u16).to_be_bytes());
        }
    }
    frame.extend([0; 4]);
    frame.extend(text.as_bytes());
    frame
}
