//! `pellucid prove --against URL...`: checks that running servers give the same replies, whatever their load.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail};
use pellucid_sampling::uniform;
use serde_json::{Value, json};

use super::{ProveArgs, verdict_name};
use crate::server_client::{Client, ServerVariables};
use crate::terminal::format::grouped;
use crate::terminal::output::Output;

/// Words of the prompts. Texts, not tokens: a server does not tell the size of its vocabulary.
const WORDS: [&str; 32] = [
    "river", "the", "of", "light", "seven", "under", "and", "machine", "green", "a", "letter", "runs", "to", "cold",
    "garden", "is", "12", "because", "bread", "in", "music", "never", "paper", "with", "stone", "they", "7.5", "open",
    "window", "said", "code", "why",
];
/// Number of prompts that begin with the same words, so that prefix caches are used.
const FAMILY: u32 = 8;

/// The answer of a server to a prompt.
#[derive(Debug, Clone, PartialEq)]
struct Reply {
    fingerprint: String,
    /// Text, reason of the end, and log probabilities, as the server wrote them.
    choice: Value,
}

/// The replies of one server in one setting, compared with those of the first one.
#[derive(Debug, serde::Serialize)]
struct Row {
    url: String,
    setting: String,
    fingerprint: String,
    num_replies: usize,
    num_different: usize,
    /// The first difference, in words.
    difference: Option<String>,
}

pub(super) fn run(args: &ProveArgs, variables: &ServerVariables, output: &mut Output) -> Result<()> {
    let key = variables.api_key.as_ref();
    let clients = args.against.iter().map(|url| Client::at("--against", url, key)).collect::<Result<Vec<_>>>()?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => first_model(&clients[0])?,
    };
    let prompts: Vec<Value> = (0..args.prompts).map(|i| request(args, &model, i)).collect();
    let mut rows: Vec<Row> = Vec::new();
    let mut expected: Option<Vec<Reply>> = None;
    for client in &clients {
        for together in [1, args.together as usize] {
            let replies = ask_all(client, &prompts, together)?;
            let expected = expected.get_or_insert_with(|| replies.clone());
            rows.push(compare(client, together, &prompts, expected, &replies));
        }
    }
    let num_different: usize = rows.iter().map(|row| row.num_different).sum();
    let is_one = rows.iter().all(|row| row.fingerprint == rows[0].fingerprint);
    if args.json {
        let result = json!({
            "model": model, "prompts": args.prompts, "reply_tokens": args.reply,
            "servers": rows, "different": num_different, "one_fingerprint": is_one,
            "verdict": verdict_name(num_different + usize::from(!is_one)),
        });
        output.write_json(&result)?;
    } else {
        print(output, args, &model, &rows)?;
        let verdict = match (num_different, is_one) {
            (0, true) => "proved: the servers have one fingerprint and give the same replies, to the bit".to_owned(),
            (0, false) => {
                "REFUTED: these replies are equal, but the fingerprints differ, so others may not be".to_owned()
            }
            (count, _) => format!("REFUTED: {} replies differ from those of the first server", grouped(count as u64)),
        };
        writeln!(output, "{verdict}")?;
    }
    if num_different > 0 || !is_one {
        output.flush()?;
        bail!("the servers differ: do not put them behind one gateway");
    }
    Ok(())
}

fn first_model(client: &Client) -> Result<String> {
    let answer = client.get("/v1/models")?;
    let id = answer["data"][0]["id"].as_str();
    Ok(id.with_context(|| format!("{} lists no models", client.url()))?.to_owned())
}

/// Returns the body of a request for a random prompt. Half of them are greedy.
fn request(args: &ProveArgs, model: &str, i: u32) -> Value {
    let draw = |owner: u32, purpose: u32| uniform(args.seed, owner, purpose);
    let family = u32::MAX - i / FAMILY;
    // A word has about two tokens.
    let longest = (args.longest / 2).max(1);
    let len = (f64::from(longest).powf(draw(i, 0)) as u32).clamp(1, longest);
    let shared = (draw(family, 0) * f64::from(longest)) as u32;
    let word = |at: u32| {
        let owner = if at < shared { family } else { i };
        WORDS[(draw(owner, 1 + at) * WORDS.len() as f64) as usize % WORDS.len()]
    };
    let prompt = (0..len).map(word).collect::<Vec<_>>().join(" ");
    let temperature = if i.is_multiple_of(2) { 0.0 } else { 0.9 };
    json!({
        "model": model, "prompt": prompt, "max_tokens": args.reply, "temperature": temperature,
        "seed": args.seed.wrapping_add(i.into()) & (u64::MAX >> 1), "logprobs": 3,
    })
}

/// Sends all requests, `together` at a time, and returns the replies in their order.
fn ask_all(client: &Client, requests: &[Value], together: usize) -> Result<Vec<Reply>> {
    let next = AtomicUsize::new(0);
    let work = || -> Result<Vec<(usize, Reply)>> {
        let mut replies = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(request) = requests.get(i) else { return Ok(replies) };
            let reply = ask(client, request).inspect_err(|_| next.store(requests.len(), Ordering::Relaxed))?;
            replies.push((i, reply));
        }
    };
    let mut replies = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..together.min(requests.len())).map(|_| scope.spawn(work)).collect();
        let mut all = Vec::new();
        for thread in threads {
            let Ok(part) = thread.join() else { bail!("an internal error occurred while asking {}", client.url()) };
            all.extend(part?);
        }
        Ok(all)
    })?;
    replies.sort_unstable_by_key(|(i, _)| *i);
    Ok(replies.into_iter().map(|(_, reply)| reply).collect())
}

fn ask(client: &Client, request: &Value) -> Result<Reply> {
    let answer = client.post("/v1/completions", request)?;
    let mut choice = answer["choices"][0].clone();
    if !choice["text"].is_string() {
        bail!("{} answers without a choice: {answer}", client.url());
    }
    // The engine's measurements differ from run to run.
    choice.as_object_mut().map(|members| members.shift_remove("pellucid"));
    Ok(Reply { fingerprint: answer["system_fingerprint"].as_str().unwrap_or("none").to_owned(), choice })
}

fn compare(client: &Client, together: usize, requests: &[Value], expected: &[Reply], found: &[Reply]) -> Row {
    let mut pairs = expected.iter().zip(found).zip(requests);
    let in_reply = pairs.find_map(|((expected, found), request)| difference(request, expected, found));
    let (fingerprint, first) = (&found[0].fingerprint, &expected[0].fingerprint);
    let in_fingerprint = || (fingerprint != first).then(|| format!("the fingerprint is {fingerprint}, not {first}"));
    Row {
        url: client.url().to_owned(),
        setting: if together == 1 { "one at a time".into() } else { format!("{together} at once") },
        fingerprint: fingerprint.clone(),
        num_replies: found.len(),
        num_different: expected.iter().zip(found).filter(|(expected, found)| expected.choice != found.choice).count(),
        difference: in_reply.or_else(in_fingerprint),
    }
}

/// Describes the first difference of two replies.
fn difference(request: &Value, expected: &Reply, found: &Reply) -> Option<String> {
    if expected.choice == found.choice {
        return None;
    }
    let mut prompt: String = request["prompt"].as_str().unwrap_or_default().chars().take(41).collect();
    if prompt.chars().nth(40).is_some() {
        prompt = prompt.chars().take(40).chain("…".chars()).collect();
    }
    let token = |reply: &Reply, at: usize| {
        let (tokens, logprobs) = (&reply.choice["logprobs"]["tokens"], &reply.choice["logprobs"]["token_logprobs"]);
        tokens.get(at).map(|token| format!("{token} with {}", logprobs[at]))
    };
    let at = (0..).find(|&at| token(expected, at) != token(found, at) || token(expected, at).is_none()).unwrap_or(0);
    let named =
        |reply: &Reply| token(reply, at).unwrap_or_else(|| format!("the end ({})", reply.choice["finish_reason"]));
    let (found, expected) = (named(found), named(expected));
    Some(format!("after {prompt:?}, token {} is {found}, not {expected}", at + 1))
}

fn print(out: &mut impl Write, args: &ProveArgs, model: &str, rows: &[Row]) -> Result<()> {
    writeln!(
        out,
        "{} prompts of up to {} words, {} tokens each, model {model}\n",
        args.prompts,
        args.longest / 2,
        args.reply
    )?;
    let width = rows.iter().map(|row| row.url.len() + row.setting.len() + 2).max().unwrap_or(0);
    let fingerprint = rows.iter().map(|row| row.fingerprint.len()).max().unwrap_or(0).max("fingerprint".len());
    writeln!(out, "{:width$}  {:fingerprint$}  {:>9}  {:>9}", "", "fingerprint", "replies", "different")?;
    for row in rows {
        let name = format!("{}, {}", row.url, row.setting);
        let [replies, different] = [row.num_replies, row.num_different].map(|count| grouped(count as u64));
        writeln!(out, "{name:width$}  {:fingerprint$}  {replies:>9}  {different:>9}", row.fingerprint)?;
    }
    writeln!(out)?;
    for row in rows {
        if let Some(difference) = &row.difference {
            writeln!(out, "{}, {}: {difference}", row.url, row.setting)?;
        }
    }
    Ok(())
}
