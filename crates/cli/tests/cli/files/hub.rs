//! The model store through the built program, against a hub on this machine that misbehaves in every way we know.

use crate::support::{Home, Reply, Request, Server, noise, sha256, start};
use serde_json::{Value, json};
use std::io::{BufRead, Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A listing entry of a file in Git LFS.
fn large(path: &str, content: &[u8]) -> Value {
    json!({ "type": "file", "path": path, "size": content.len(), "oid": "pointer",
            "lfs": { "oid": sha256(content), "size": content.len(), "pointerSize": 135 } })
}

/// A listing entry of a small file.
fn small(path: &str, content: &[u8]) -> Value {
    json!({ "type": "file", "path": path, "size": content.len(), "oid": format!("git-{}", &sha256(content)[..12]) })
}

fn listing(entries: &[Value]) -> Reply {
    Reply::new(200, serde_json::to_string(entries).unwrap())
}

/// A hub that holds one GGUF file `m.gguf` in `o/r`, whose file requests are answered by `answer` (with their count so
/// far).
fn hub_with(content: &[u8], answer: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Server {
    let entries = [json!({ "type": "directory", "path": "x", "oid": "d", "size": 0 }), large("m.gguf", content)];
    let count = AtomicUsize::new(0);
    Server::start(move |request| match request.path.as_str() {
        "/api/models/o/r/tree/main?recursive=true" => listing(&entries),
        "/o/r/resolve/main/m.gguf" => answer(request, count.fetch_add(1, Ordering::SeqCst)),
        _ => Reply::new(404, "no"),
    })
}

/// A hub that holds these files in `o/r` and sends them well.
fn good_hub(files: &[(&str, &[u8])]) -> Server {
    let entries: Vec<_> = files
        .iter()
        .map(|(path, content)| if path.ends_with(".json") { small(path, content) } else { large(path, content) })
        .collect();
    let files: Vec<_> = files.iter().map(|(path, content)| (path.to_string(), content.to_vec())).collect();
    Server::start(move |request| {
        if request.path.starts_with("/api/models/o/r/tree/") {
            return listing(&entries);
        }
        let path = request.path.split("/resolve/main/").nth(1).unwrap_or_default();
        match files.iter().find(|(name, _)| name == path) {
            Some((_, content)) => Reply::file(request, content),
            None => Reply::new(404, "no"),
        }
    })
}

#[test]
fn a_pull_follows_the_hub_to_its_cdn_and_leaves_the_token_behind() {
    let content = noise(300_000);
    let file = content.clone();
    let cdn = Server::start(move |request| Reply::file(request, &file));
    let (to, tag) = (format!("{}/blob?sig=1", cdn.url), format!("\"{}\"", sha256(&content)));
    let hub = hub_with(&content, move |_, _| {
        Reply::redirect(&to).header("X-Linked-Etag", &tag).header("X-Linked-Size", "300000")
    });
    let home = Home::new();
    let run =
        home.command(&["pull", "o/r"]).env("HF_ENDPOINT", &hub.url).env("HF_TOKEN", "hf_secret\n").output().unwrap();
    let ran = crate::support::Ran::from(run);

    let path = home.model_folder("o/r").join("m.gguf");
    assert_eq!(ran.ok().trim_end(), path.to_str().unwrap());
    assert_eq!(std::fs::read(&path).unwrap(), content);
    assert!(!ran.stderr.contains("hf_secret"), "{ran:?}");
    for request in hub.requests() {
        assert_eq!(request.headers["authorization"], "Bearer hf_secret");
    }
    assert_eq!(cdn.requests().len(), 1);
    assert!(!cdn.requests()[0].headers.contains_key("authorization"));
    assert_eq!(home.files(), ["models/o/r/.manifests/m.gguf.json", "models/o/r/m.gguf"]);

    let manifest: Value =
        serde_json::from_slice(&std::fs::read(home.path().join("models/o/r/.manifests/m.gguf.json")).unwrap()).unwrap();
    assert_eq!(manifest["name"], "o/r/m.gguf");
    assert_eq!(manifest["files"][0]["sha256"], sha256(&content));
    assert_eq!(manifest["files"][0]["bytes"], 300_000);
    assert!(manifest["source"].as_str().unwrap().ends_with("/o/r"));
}

#[test]
fn a_second_pull_fetches_nothing() {
    let content = noise(1000);
    let hub = good_hub(&[("m.gguf", &content)]);
    let home = Home::new();
    home.run_at(&hub, &["pull", "o/r"]).ok();
    let ran = home.run_at(&hub, &["pull", "o/r"]);
    assert!(ran.ok().contains("m.gguf") && ran.stderr.contains("already there"), "{ran:?}");
    assert_eq!(hub.file_starts().len(), 1);

    // The same size with other bytes is noticed.
    let path = home.model_folder("o/r").join("m.gguf");
    std::fs::write(&path, vec![0; 1000]).unwrap();
    home.run_at(&hub, &["pull", "o/r"]).ok();
    assert_eq!(std::fs::read(&path).unwrap(), content);
}

#[test]
fn a_wrong_hash_is_told_and_deleted() {
    let content = noise(1000);
    let hub = hub_with(&content, |_, _| Reply::new(200, vec![7; 1000]));
    let home = Home::new();
    let ran = home.run_at(&hub, &["pull", "o/r"]);
    assert!(ran.error().contains(&sha256(&content)) && ran.error().contains(&sha256(&[7; 1000])), "{ran:?}");
    assert!(home.files().is_empty(), "{:?}", home.files());
}

#[test]
fn a_hub_that_announces_another_file_is_refused_before_the_download() {
    let content = noise(1000);
    let file = content.clone();
    let hub = hub_with(&content, move |request, _| {
        Reply::file(request, &file).header("X-Linked-Etag", format!("\"{}\"", "0".repeat(64)))
    });
    let home = Home::new();
    let ran = home.run_at(&hub, &["pull", "o/r"]);
    assert!(ran.error().contains("the hub has a different file"), "{ran:?}");
    assert!(!home.model_folder("o/r").join("m.gguf").exists());
}

#[test]
fn a_broken_connection_is_resumed() {
    let content = noise(200_000);
    let file = content.clone();
    // Two breaks, then the rest.
    let hub = hub_with(&content, move |request, count| match count {
        0 => Reply::file(request, &file).cut(50_000),
        1 => Reply::file(request, &file).cut(60_000),
        _ => Reply::file(request, &file),
    });
    let home = Home::new();
    let ran = home.run_at(&hub, &["pull", "o/r"]);
    ran.ok();
    assert_eq!(hub.file_starts(), [None, Some(50_000), Some(110_000)], "{ran:?}");
    assert_eq!(std::fs::read(home.model_folder("o/r").join("m.gguf")).unwrap(), content);
}

#[test]
fn a_later_run_resumes_what_an_earlier_one_left() {
    let content = noise(200_000);
    let file = content.clone();
    let broken = hub_with(&content, move |request, count| match count {
        0 => Reply::file(request, &file).cut(50_000),
        _ => Reply::new(503, "busy"),
    });
    let home = Home::new();
    let ran = home.run_at(&broken, &["pull", "o/r"]);
    assert!(ran.error().contains("503"), "{ran:?}");
    assert_eq!(home.files(), ["models/o/r/m.gguf.part", "models/o/r/m.gguf.part.json"]);

    let good = good_hub(&[("m.gguf", &content)]);
    home.run_at(&good, &["pull", "o/r"]).ok();
    assert_eq!(good.file_starts(), [Some(50_000)]);
    assert_eq!(home.files(), ["models/o/r/.manifests/m.gguf.json", "models/o/r/m.gguf"]);
}

#[test]
fn a_server_that_never_brings_more_is_given_up() {
    let content = noise(100_000);
    let file = content.clone();
    let hub = hub_with(&content, move |request, _| match start(request) {
        None => Reply::file(request, &file).cut(10_000),
        Some(_) => Reply::file(request, &file).cut(0),
    });
    let home = Home::new();
    let ran = home.run_at(&hub, &["pull", "o/r"]);
    assert!(ran.error().contains("m.gguf.part, run the command again to resume"), "{ran:?}");
    assert!(hub.file_starts().len() <= 5);
}

#[test]
fn a_server_without_ranges_starts_over() {
    let content = noise(100_000);
    let file = content.clone();
    let hub = hub_with(&content, move |_, count| match count {
        0 => Reply::new(200, file.clone()).cut(30_000),
        _ => Reply::new(200, file.clone()),
    });
    let home = Home::new();
    let ran = home.run_at(&hub, &["pull", "o/r"]);
    ran.ok();
    assert_eq!(hub.file_starts(), [None, Some(30_000)]);
    assert!(ran.stderr.contains("cannot resume"), "{ran:?}");
    assert_eq!(std::fs::read(home.model_folder("o/r").join("m.gguf")).unwrap(), content);
}

#[test]
fn a_file_that_changed_between_runs_starts_over() {
    let (old, new) = (noise(100_000), vec![3; 90_000]);
    let file = old.clone();
    let before = hub_with(&old, move |request, count| match count {
        0 => Reply::file(request, &file).cut(30_000),
        _ => Reply::new(503, ""),
    });
    let home = Home::new();
    home.run_at(&before, &["pull", "o/r"]).error();
    let after = good_hub(&[("m.gguf", &new)]);
    home.run_at(&after, &["pull", "o/r"]).ok();
    assert_eq!(after.file_starts(), [None], "a part of the old file was continued");
    assert_eq!(std::fs::read(home.model_folder("o/r").join("m.gguf")).unwrap(), new);
}

#[test]
fn a_tag_that_changed_in_the_middle_starts_over() {
    let content = noise(100_000);
    let file = content.clone();
    let hub = hub_with(&content, move |request, count| match count {
        0 => Reply::new(200, vec![9; 100_000]).header("ETag", "\"old\"").cut(30_000),
        _ => Reply::file(request, &file).header("ETag", "\"new\""),
    });
    let home = Home::new();
    let ran = home.run_at(&hub, &["pull", "o/r"]);
    ran.ok();
    assert!(ran.stderr.contains("has changed on the server"), "{ran:?}");
    assert_eq!(hub.file_starts(), [None, Some(30_000), None]);
}

#[test]
fn a_range_that_was_not_asked_for_starts_over() {
    let content = noise(100_000);
    let file = content.clone();
    let hub = hub_with(&content, move |request, count| match count {
        0 => Reply::file(request, &file).cut(30_000),
        1 => Reply::new(206, &file[20_000..]).header("Content-Range", "bytes 20000-99999/100000"),
        _ => Reply::file(request, &file),
    });
    let home = Home::new();
    home.run_at(&hub, &["pull", "o/r"]).ok();
    assert_eq!(hub.file_starts(), [None, Some(30_000), None]);
}

#[test]
fn lengths_other_than_expected_are_refused() {
    let content = noise(1000);
    for sent in [999, 1001] {
        let hub = hub_with(&content, move |_, _| Reply::new(200, vec![1; sent]));
        let ran = Home::new().run_at(&hub, &["pull", "o/r"]);
        assert!(ran.error().contains(&format!("announced {sent} bytes")), "{ran:?}");
    }
    // Without an announcement, a body that does not end is cut off where the file should end.
    let endless = hub_with(&content, |_, _| {
        let chunk = [b"3e80\r\n".as_slice(), &[1; 16_000], b"\r\n0\r\n\r\n"].concat();
        Reply::new(200, chunk).header("Transfer-Encoding", "chunked")
    });
    let home = Home::new();
    let ran = home.run_at(&endless, &["pull", "o/r"]);
    assert!(ran.error().contains("more than the 1000 bytes"), "{ran:?}");
    assert!(!home.model_folder("o/r").join("m.gguf").exists());
}

#[test]
fn refusals_say_what_to_do() {
    // The hub answers 401 for a repository that does not exist: a name that is wrong is an error of usage.
    for (status, exit, word) in [
        (401, 2, "HF_TOKEN is not set"),
        (403, 1, "accept its terms"),
        (404, 2, "o/r does not exist"),
        (429, 1, "limits the rate"),
        (500, 1, "has an internal error"),
    ] {
        let hub = Server::start(move |_| Reply::new(status, "secret body"));
        let home = Home::new();
        for args in [&["pull", "o/r"][..], &["run", "-m", "o/r", "hi"], &["serve", "--port", "0", "-m", "o/r:Q4_0"]] {
            let ran = home.run_at(&hub, args);
            let message = if exit == 2 { ran.usage() } else { ran.error() };
            assert!(message.contains(word) && message.contains(&status.to_string()), "{args:?}: {ran:?}");
            assert!(home.files().is_empty());
        }
    }
    // With a token, 401 says that the hub does not accept the token.
    let hub = Server::start(|_| Reply::new(401, ""));
    let run = Home::new().command(&["pull", "o/r"]).env("HF_ENDPOINT", &hub.url).env("HF_TOKEN", "hf_x").output();
    assert!(crate::support::Ran::from(run.unwrap()).error().contains("HF_TOKEN was not accepted"));
    let hub = Server::start(|_| Reply::new(200, "<html>not a listing</html>"));
    assert!(Home::new().run_at(&hub, &["pull", "o/r"]).error().contains("invalid file listing"));
    let hub = Server::start(|_| Reply::redirect("/again"));
    assert!(Home::new().run_at(&hub, &["pull", "o/r"]).error().contains("redirected more than"));
}

#[test]
fn a_silent_server_is_left_and_tried_again() {
    let content = noise(100_000);
    let file = content.clone();
    let hub = hub_with(&content, move |request, count| match count {
        0 => Reply::file(request, &file).cut(40_000).silent(Duration::from_secs(60)),
        _ => Reply::file(request, &file),
    });
    let home = Home::new();
    let begin = Instant::now();
    let ran = home.run_at(&hub, &["pull", "o/r", "--stall-timeout", "1"]);
    ran.ok();
    assert!(ran.stderr.contains("sent no data in time"), "{ran:?}");
    assert!(begin.elapsed() < Duration::from_secs(10));
    assert_eq!(hub.file_starts(), [None, Some(40_000)]);

    let mute = Server::start(|_| {
        std::thread::sleep(Duration::from_secs(60));
        Reply::new(200, "[]")
    });
    let begin = Instant::now();
    let ran = Home::new().run_at(&mute, &["pull", "o/r", "--stall-timeout", "1"]);
    assert!(ran.error().contains("did not answer in time"), "{ran:?}");
    assert!(begin.elapsed() < Duration::from_secs(10));
}

#[test]
fn hostile_names_touch_nothing() {
    for name in [
        "../../evil.gguf",
        "/evil.gguf",
        "a/../../evil.gguf",
        "a\\..\\evil.gguf",
        "C:evil.gguf",
        "x\u{0}.gguf",
        ".manifests/evil.gguf",
        "",
    ] {
        let hub = Server::start(move |request| match request.path.starts_with("/api/") {
            true => listing(&[large(name, b"evil")]),
            false => Reply::new(200, "evil"),
        });
        let home = Home::new();
        let ran = home.run_at(&hub, &["pull", "o/r"]);
        assert!(ran.error().contains("unsafe file name"), "{name:?}: {ran:?}");
        assert!(home.files().is_empty(), "{name:?}: {:?}", home.files());
        assert_eq!(hub.requests().len(), 1, "{name:?} was asked for");
    }
    for name in ["../x", "o/..", "o/r/../../x.gguf", "o r/x", "word"] {
        assert!(Home::new().run(&["pull", name]).usage().contains("name"), "{name:?}");
    }
}

#[test]
fn a_repository_with_several_models_asks_for_a_choice() {
    let (four, eight) = (noise(100), noise(200));
    let hub = good_hub(&[("m-Q4_K_M.gguf", &four), ("m-Q8_0.gguf", &eight), ("mmproj-m.gguf", b"x")]);
    let home = Home::new();
    let without_default = good_hub(&[("m-Q5_0.gguf", &four), ("m-Q8_0.gguf", &eight)]);
    let ran = home.run_at(&without_default, &["pull", "o/r"]);
    assert!(ran.usage().contains("m-Q5_0.gguf (100 B)") && ran.usage().contains("m-Q8_0.gguf"), "{ran:?}");
    let ran = home.run_at(&without_default, &["run", "-m", "o/r:Q2_K", "hi"]);
    assert!(ran.usage().contains("matches `o/r:Q2_K`; it holds"), "{ran:?}");
    let ran = home.run_at(&hub, &["pull", "o/r"]);
    assert!(ran.ok().ends_with("m-Q4_K_M.gguf\n"), "{ran:?}");
    assert!(ran.stderr.contains("pulling o/r/m-Q4_K_M.gguf from 127.0.0.1: 100 B"), "{ran:?}");
    home.run_at(&hub, &["pull", "o/r:q4_k_m"]).ok();
    home.run_at(&hub, &["pull", "o/r/m-Q8_0.gguf"]).ok();

    // Both are pulled: the repository alone is ambiguous, tags and files are not.
    let list = home.run(&["list"]);
    assert!(list.ok().contains("o/r/m-Q4_K_M.gguf\n  100 B  gguf  20"), "{list:?}");
    assert!(home.run(&["rm", "o/r"]).usage().contains("2 pulled models"));
    assert_eq!(home.run(&["rm", "o/r:Q4_K_M"]).ok(), "removed o/r/m-Q4_K_M.gguf: 100 bytes freed (100 B)\n");
    assert_eq!(home.files(), ["models/o/r/.manifests/m-Q8_0.gguf.json", "models/o/r/m-Q8_0.gguf"]);
    let ran = home.run(&["rm", "o/r:Q4_K_M"]);
    assert!(ran.usage().contains("there are: o/r/m-Q8_0.gguf"), "{ran:?}");
    home.run(&["rm", "o/r"]).ok();
    assert!(home.files().is_empty());
    assert!(!home.path().join("models/o").exists());
}

#[test]
fn split_models_and_folders_come_whole() {
    let (one, two) = (noise(100), noise(200));
    let hub = good_hub(&[("q/m-00001-of-00002.gguf", &one), ("q/m-00002-of-00002.gguf", &two), ("README.md", b"x")]);
    let home = Home::new();
    let path = home.run_at(&hub, &["pull", "o/r/q/m-00002-of-00002.gguf"]).ok().to_owned();
    assert!(path.ends_with("q/m-00001-of-00002.gguf\n"), "{path}");
    assert_eq!(std::fs::read(home.model_folder("o/r").join("q/m-00002-of-00002.gguf")).unwrap(), two);
    assert!(home.run(&["rm", "o/r"]).ok().contains("300 bytes"));
    assert!(home.files().is_empty());

    let hub = good_hub(&[
        ("config.json", b"{}"),
        ("tokenizer.json", b"{ }"),
        ("model.safetensors", &one),
        ("x.bin", b"pickle"),
    ]);
    let path = home.run_at(&hub, &["pull", "o/r"]).ok().to_owned();
    assert_eq!(path.trim_end(), home.model_folder("o/r").to_str().unwrap());
    let list: Value = serde_json::from_str(home.run(&["list", "--json"]).ok()).unwrap();
    assert_eq!(list[0]["name"], "o/r");
    assert_eq!(list[0]["format"], "safetensors");
    assert_eq!(list[0]["bytes"], 105);
    assert_eq!(list[0]["files"].as_array().unwrap().len(), 3);
    assert!(!home.model_folder("o/r").join("x.bin").exists());
}

#[test]
fn revisions_and_odd_names_are_escaped() {
    let content = noise(50);
    let file = content.clone();
    let entries = [large("a b+é.gguf", &content)];
    let hub = Server::start(move |request| match request.path.as_str() {
        "/api/models/o/r/tree/refs%2Fpr%2F1?recursive=true" => listing(&entries),
        "/o/r/resolve/refs%2Fpr%2F1/a%20b%2B%C3%A9.gguf" => Reply::file(request, &file),
        _ => Reply::new(404, ""),
    });
    let home = Home::new();
    home.run_at(&hub, &["pull", "o/r", "--revision", "refs/pr/1"]).ok();
    assert_eq!(std::fs::read(home.model_folder("o/r").join("a b+é.gguf")).unwrap(), content);
}

#[test]
fn long_listings_come_in_pages_of_one_host() {
    let content = noise(50);
    let file = content.clone();
    let entries = [large("m.gguf", &content)];
    let hub = Server::start(move |request| {
        let next = |url: &str| listing(&[small("README.json", b"x")]).header("Link", format!("<{url}>; rel=\"next\""));
        let host = format!("http://{}", request.headers["host"]);
        match request.path.as_str() {
            "/api/models/o/r/tree/main?recursive=true" => next(&format!("{host}/page2")),
            "/api/models/o/away/tree/main?recursive=true" => next("http://127.0.0.1:9/page2"),
            "/page2" => listing(&entries),
            _ => Reply::file(request, &file),
        }
    });
    let home = Home::new();
    home.run_at(&hub, &["pull", "o/r"]).ok();
    assert!(home.run_at(&hub, &["pull", "o/away"]).error().contains("another host"));
}

#[test]
fn two_processes_pull_once() {
    let content = noise(100_000);
    let file = content.clone();
    let hub = hub_with(&content, move |request, _| {
        std::thread::sleep(Duration::from_millis(700));
        Reply::file(request, &file)
    });
    let home = Home::new();
    let start = || home.command(&["pull", "o/r"]).env("HF_ENDPOINT", &hub.url).spawn().unwrap();
    let children = [start(), start(), start()];
    for child in children {
        crate::support::Ran::from(child.wait_with_output().unwrap()).ok();
    }
    assert_eq!(hub.file_starts(), [None]);
    assert_eq!(std::fs::read(home.model_folder("o/r").join("m.gguf")).unwrap(), content);
}

#[cfg(unix)]
#[test]
fn ctrl_c_keeps_the_part_and_says_so() {
    let content = noise(100_000);
    let file = content.clone();
    let hub = hub_with(&content, move |request, count| match count {
        0 => Reply::file(request, &file).cut(40_000).silent(Duration::from_secs(60)),
        _ => Reply::file(request, &file),
    });
    let home = Home::new();
    let child = home.command(&["pull", "o/r"]).env("HF_ENDPOINT", &hub.url).spawn().unwrap();
    let part = home.model_folder("o/r").join("m.gguf.part");
    let begin = Instant::now();
    while std::fs::metadata(&part).map_or(0, |found| found.len()) < 40_000 {
        assert!(begin.elapsed() < Duration::from_secs(20), "the part did not grow");
        std::thread::sleep(Duration::from_millis(10));
    }
    let killed = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let ran = crate::support::Ran::from(child.wait_with_output().unwrap());
    assert_eq!(ran.status, Some(130), "{ran:?}");
    assert!(ran.stderr.contains("m.gguf.part; run the command again to resume"), "{ran:?}");
    home.run_at(&hub, &["pull", "o/r"]).ok();
    assert_eq!(hub.file_starts(), [None, Some(40_000)]);
}

#[test]
fn the_default_model_says_what_was_tried() {
    // Nothing listens at the endpoint, and there is no python3 on the path.
    let home = Home::new();
    let ran = home.run(&["inspect", "smollm2"]);
    for word in [
        "127.0.0.1 refused the connection",
        "python3 is not installed",
        "b179c9523d0e",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "--model PATH",
    ] {
        assert!(ran.error().contains(word), "{word}: {ran:?}");
    }
    assert!(home.files().is_empty(), "{:?}", home.files());
    // A hub that holds something else under that name does not get it into the store.
    let hub = Server::start(|_| Reply::new(200, "short"));
    let ran = home.run_at(&hub, &["pull", "smollm2-135m-instruct"]);
    assert!(ran.error().contains("announced 5 bytes"), "{ran:?}");
    assert!(!home.files().iter().any(|file| file.ends_with(".gguf")));
}

#[test]
fn a_model_that_only_the_hub_has_says_so() {
    let home = Home::new();
    let ran = home.run(&["pull", "qwen3:0.6b"]);
    for word in [
        "the model qwen3-0.6b could not be fetched",
        "127.0.0.1 refused the connection",
        "Only the hub has it",
        "needs no hub: qwen2.5-coder-1.5b, qwen2.5-coder-0.5b, smollm2, tiny",
        "Qwen3-0.6B-Q8_0.gguf (sha256 9465e63a22ad",
    ] {
        assert!(ran.error().contains(word), "{word}: {ran:?}");
    }
    assert!(ran.stderr.contains("639.4 MB to download once"), "{ran:?}");
    assert!(home.files().is_empty(), "{:?}", home.files());
    // A hub that announces another file is refused before a byte is kept.
    let hub = Server::start(|_| Reply::new(200, "short"));
    let ran = home.run_at(&hub, &["pull", "qwen3-0.6b"]);
    assert!(ran.error().contains("announced 5 bytes") && ran.error().contains("Only the hub"), "{ran:?}");
    assert!(home.files().is_empty(), "{:?}", home.files());

    let listed = home.run(&["models"]);
    let line = listed.ok().lines().find(|line| line.starts_with("llama3.2-3b ")).unwrap_or_default();
    for word in ["2.0 GB", "3.2 to 20.8 GB", "hub", "summaries", "(Llama 3.2 licence)"] {
        assert!(line.contains(word), "{word}: {listed:?}");
    }
    let models: Value = serde_json::from_str(home.run(&["models", "--json"]).ok()).unwrap();
    assert!(models.as_array().unwrap().iter().all(|model| model["memory_bytes"].is_u64()), "{models}");
}

#[test]
fn names_that_mean_nothing_are_told_where_they_were_looked_for() {
    let home = Home::new();
    for command in ["inspect", "tokenize"] {
        let ran = home.run(&[command, "nothing-here"]);
        for word in ["`nothing-here`", home.path().to_str().unwrap(), "pellucid models", "OWNER/REPO"] {
            assert!(ran.usage().contains(word), "{word}: {ran:?}");
        }
    }
    assert!(home.run(&["rm", "smollm2"]).usage().contains("there are: none"));
    let empty = home.run(&["list"]);
    assert!(empty.ok().is_empty() && empty.stderr.starts_with("no models in "), "{empty:?}");
    assert_eq!(home.run(&["list", "--json"]).ok(), "[]\n");
}

#[test]
fn a_store_that_cannot_be_written_is_a_sentence() {
    let content = noise(10);
    let hub = good_hub(&[("m.gguf", &content)]);
    let home = Home::new();
    let file = home.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let ran = home.run_at(&hub, &["pull", "o/r", "--models-dir", file.to_str().unwrap()]);
    assert!(ran.error().contains("could not make the folder"), "{ran:?}");
    let ran = home.run(&["pull", "o/r", "--endpoint", "ftp://x"]);
    assert!(ran.usage().contains("must begin with https://"), "{ran:?}");
}

#[test]
fn a_damaged_manifest_cannot_delete_other_files() {
    let content = noise(10);
    let hub = good_hub(&[("m.gguf", &content)]);
    let home = Home::new();
    home.run_at(&hub, &["pull", "o/r"]).ok();
    let manifest = home.path().join("models/o/r/.manifests/m.gguf.json");
    let text = std::fs::read_to_string(&manifest).unwrap();
    std::fs::write(home.path().join("precious"), "x").unwrap();
    std::fs::write(&manifest, text.replace("\"path\": \"m.gguf\"", "\"path\": \"../../../precious\"")).unwrap();
    let ran = home.run(&["rm", "o/r"]);
    assert!(ran.error().contains("damaged") && ran.error().contains("unsafe file name"), "{ran:?}");
    assert!(home.path().join("precious").exists());
}

#[test]
fn a_damaged_manifest_is_no_matter_to_other_models() {
    let content = noise(10);
    let hub = good_hub(&[("m.gguf", &content)]);
    let home = Home::new();
    home.run_at(&hub, &["pull", "o/r"]).ok();
    let folder = home.path().join("models/foo/bar/.manifests");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("x.gguf.json"), "").unwrap();
    let listed = home.run(&["list"]);
    assert!(listed.ok().contains("o/r"), "{listed:?}");
    assert!(listed.stderr.contains("x.gguf.json is damaged"), "{listed:?}");
    assert!(home.run(&["rm", "foo/bar"]).error().contains("x.gguf.json is damaged"));
    home.run(&["rm", "o/r"]).ok();
}

#[test]
fn a_model_argument_pulls_from_the_hub_by_name_or_address() {
    let (four, eight) = (noise(100), noise(200));
    let hub = good_hub(&[("m-Q4_K_M.gguf", &four), ("m-Q8_0.gguf", &eight)]);
    let home = Home::new();
    // The files are no models: the error after the pull names the path of the pulled file.
    for (model, file) in [
        ("o/r", "m-Q4_K_M.gguf"),
        ("o/r:Q8_0", "m-Q8_0.gguf"),
        ("https://huggingface.co/o/r/blob/main/m-Q8_0.gguf", "m-Q8_0.gguf"),
        ("https://huggingface.co/o/r/resolve/main/m-Q4_K_M.gguf?download=true", "m-Q4_K_M.gguf"),
        ("hf.co/o/r:q4_k_m", "m-Q4_K_M.gguf"),
    ] {
        for args in [&["inspect", model][..], &["run", model, "hi"], &["run", "hi", "-m", model]] {
            let ran = home.run_at(&hub, args);
            assert!(ran.usage().contains(&format!("models/o/r/{file}: ")), "{args:?}: {ran:?}");
        }
    }
    assert_eq!(hub.file_starts().len(), 2, "each file was downloaded once");
    let ran = home.run_at(&hub, &["inspect", "https://example.com/o/r"]);
    assert!(ran.usage().contains("is not at the hub"), "{ran:?}");
    let listed = home.run(&["models"]);
    assert!(listed.ok().contains("o/r/m-Q8_0.gguf") && listed.ok().contains("pulled"), "{listed:?}");
}

/// Sends a request to `/api/pull` and returns the status and the body, without the sizes of its chunks.
fn pull_over_http(address: &str, key: &str, body: &Value) -> (String, Vec<Value>) {
    let body = body.to_string();
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let head = format!("POST /api/pull HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nX-Api-Key: {key}\r\n");
    write!(stream, "{head}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    let lines = body.lines().filter(|line| line.starts_with('{')).map(|line| serde_json::from_str(line).unwrap());
    (head.split(' ').nth(1).unwrap().to_owned(), lines.collect())
}

#[test]
fn a_server_pulls_models_for_keys_with_the_right() {
    let content = noise(700_000);
    let hub = good_hub(&[("m.gguf", &content)]);
    let home = Home::new();
    let keys = home.path().join("keys.toml");
    let tenants = "[[tenant]]\nname = \"a\"\nkeys = [\"key-with-right\"]\npull = true\n\
                   [[tenant]]\nname = \"b\"\nkeys = [\"key-without-right\"]\n";
    std::fs::write(&keys, tenants).unwrap();
    let flags = ["serve", "--port", "0", "--model", "tiny", "--device", "cpu", "--keys-file", keys.to_str().unwrap()];
    let mut child = home.command(&flags).env("HF_ENDPOINT", &hub.url).spawn().unwrap();
    let log = std::io::BufReader::new(child.stderr.take().unwrap());
    let mut lines = log.lines().map_while(Result::ok);
    let address = lines.find_map(|line| Some(line.split_once("://")?.1.split(['"', ' ']).next()?.to_owned())).unwrap();
    // The pipe must be read, or the server would block.
    let reader = std::thread::spawn(move || lines.for_each(drop));
    let pull = |key: &str, body: Value| pull_over_http(&address, key, &body);

    let (status, lines) = pull("key-without-right", json!({ "model": "o/r" }));
    assert_eq!((status.as_str(), lines[0].as_object().unwrap().len()), ("403", 1), "{lines:?}");
    assert!(lines[0]["error"].as_str().unwrap().contains("`pull = true`"), "{lines:?}");
    assert!(hub.requests().is_empty());
    for (body, named) in [
        (json!({ "model": "nonsense" }), "model: `nonsense` is not a model name"),
        (json!({ "model": "o/r", "insecure": true }), "insecure is not supported"),
        (json!({}), "model is missing"),
    ] {
        let (status, lines) = pull("key-with-right", body);
        assert_eq!(status, "400", "{lines:?}");
        assert!(lines[0]["error"].as_str().unwrap().contains(named), "{lines:?}");
    }

    let (status, lines) = pull("key-with-right", json!({ "model": "o/r" }));
    assert_eq!(status, "200");
    assert_eq!(lines.first().unwrap(), &json!({ "status": "pulling manifest" }));
    assert_eq!(lines.last().unwrap(), &json!({ "status": "success" }));
    let last = &lines[lines.len() - 2];
    assert_eq!((&last["completed"], &last["total"]), (&json!(700_000), &json!(700_000)), "{lines:?}");
    let completed: Vec<u64> = lines.iter().filter_map(|line| line["completed"].as_u64()).collect();
    assert!(completed.is_sorted(), "{completed:?}");
    assert_eq!(std::fs::read(home.model_folder("o/r").join("m.gguf")).unwrap(), content);

    let whole = |model: &str| pull("key-with-right", json!({ "name": model, "stream": false }));
    assert_eq!(whole("o/r:latest"), ("200".to_owned(), vec![json!({ "status": "success" })]));
    let (status, lines) = whole("o/other");
    assert_eq!(status, "502", "{lines:?}");
    assert!(lines[0]["error"].as_str().unwrap().contains("o/other"), "{lines:?}");
    let (status, lines) = pull("key-with-right", json!({ "model": "o/other" }));
    assert_eq!((status.as_str(), lines.len()), ("200", 2));
    assert!(lines[1]["error"].as_str().unwrap().contains("o/other"), "{lines:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    reader.join().unwrap();
}
