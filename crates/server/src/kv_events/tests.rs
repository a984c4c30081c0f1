//! Subscribers that misbehave. `tests/replicas/test_kv_events.py` tests the protocol with ZeroMQ's own client.

use std::io::Read;
use std::time::Instant;

use super::*;

fn until(holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(30), "waited for too long");
        thread::sleep(Duration::from_millis(5));
    }
}

fn publisher() -> Arc<KvEventPublisher> {
    KvEventPublisher::bind("127.0.0.1:0".parse().unwrap(), String::new(), 32).unwrap()
}

fn stored(hash: u64) -> Vec<KvEvent> {
    vec![KvEvent::Stored { hash, parent: None, tokens: (0..4096).collect() }]
}

/// Connects as a subscriber of everything.
fn subscribe(publisher: &KvEventPublisher) -> TcpStream {
    let mut stream = TcpStream::connect(publisher.address()).unwrap();
    let mut bytes = vec![0; 64];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    bytes.extend(b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB\x00\x01\x01");
    stream.write_all(&bytes).unwrap();
    // The greeting and READY of the publisher.
    stream.read_exact(&mut [0; 64 + 27]).unwrap();
    until(|| publisher.shared.lock().iter().any(|subscriber| !subscriber.topics.is_empty()));
    stream
}

/// Reads a batch and returns its number.
fn read_number(reader: &mut TcpStream) -> u64 {
    // An empty topic, the number, and the payload.
    let mut head = [0; 2 + 2 + 8 + 2];
    reader.read_exact(&mut head).unwrap();
    reader.read_exact(&mut vec![0; head[13].into()]).unwrap();
    u64::from_be_bytes(head[4..12].try_into().unwrap())
}

#[test]
fn a_subscriber_that_does_not_read_costs_a_bounded_queue() {
    let publisher = publisher();
    let silent = subscribe(&publisher);
    let mut sink = publisher.sink();
    let mut slowest = Duration::ZERO;
    for number in 0..6000 {
        let started = Instant::now();
        sink.send(stored(number));
        slowest = slowest.max(started.elapsed());
        // Gives the encoding thread time, so that the queue of the subscriber fills and not that of the engine.
        if number % 100 == 99 {
            let queued = || publisher.shared.published.load(Ordering::Relaxed);
            until(|| queued() + publisher.shared.queue_full.load(Ordering::Relaxed) > number);
        }
    }
    assert!(slowest < Duration::from_secs(1), "the engine waited for {slowest:?}");
    assert!(publisher.shared.slow_subscriber.load(Ordering::Relaxed) > 1000);
    drop(silent);
    until(|| publisher.shared.lock().is_empty());
}

#[test]
fn a_full_queue_drops_batches_and_leaves_a_gap() {
    let publisher = publisher();
    let mut reader = subscribe(&publisher);
    let mut sink = publisher.sink();
    // While the list of subscribers is locked, nothing is published.
    let locked = publisher.shared.lock();
    for number in 0..2 * MAX_QUEUED as u64 {
        sink.send(vec![KvEvent::Removed { hash: number }]);
    }
    let dropped = publisher.shared.queue_full.load(Ordering::Relaxed);
    assert!(dropped >= MAX_QUEUED as u64 - 2, "{dropped}");
    drop(locked);
    let published = 2 * MAX_QUEUED as u64 - dropped;
    until(|| publisher.shared.published.load(Ordering::Acquire) == published);
    // The queue of the subscriber fills too if its thread does not run meanwhile.
    let sent = published - publisher.shared.slow_subscriber.load(Ordering::Relaxed);
    let numbers: Vec<u64> = (0..sent).map(|_| read_number(&mut reader)).collect();
    assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]));
    sink.send(vec![KvEvent::Removed { hash: 9 }]);
    assert_eq!(read_number(&mut reader), 2 * MAX_QUEUED as u64);
}

#[test]
fn connections_are_bounded() {
    let publisher = publisher();
    let count = || publisher.shared.num_connections.load(Ordering::Relaxed);
    let idle: Vec<TcpStream> = (0..MAX_CONNECTIONS).map(|_| TcpStream::connect(publisher.address()).unwrap()).collect();
    until(|| count() == MAX_CONNECTIONS);
    let mut further = TcpStream::connect(publisher.address()).unwrap();
    assert_eq!(further.read(&mut [0; 8]).unwrap_or(0), 0, "a further connection is closed");
    drop(idle);
    until(|| count() == 0);
    subscribe(&publisher);
}
