//! Publishes the changes of one tenant's prefix cache over ZeroMQ, in vLLM's format, for routers such as Dynamo and
//! llm-d: a topic, a sequence number of eight bytes, and `[time, [events], rank]` in MessagePack.
//!
//! The engine never waits. Its batches go through a bounded queue to a thread that encodes them, and from there through
//! a bounded queue to the thread of each subscriber. A batch that finds a queue full is dropped and counted, and
//! subscribers see a gap in the sequence numbers.

mod msgpack;
mod zmtp;

use std::fmt;
use std::io::{self, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pellucid_engine::kv_cache::{KvEvent, KvEventSink};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use msgpack::MessagePack;
use zmtp::Incoming;

/// Batches that wait to be encoded, and encoded batches that wait for one subscriber.
const MAX_QUEUED: usize = 1024;
/// Maximum connections; further ones are closed.
const MAX_CONNECTIONS: usize = 16;
/// Maximum topics of a subscriber.
const MAX_TOPICS: usize = 16;
/// Maximum time for a subscriber to greet, and to accept a batch.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// A publisher of changes of the prefix cache. It listens until the process ends.
#[derive(Debug)]
pub struct KvEventPublisher {
    address: SocketAddr,
    shared: Arc<Shared>,
    queue: SyncSender<Batch>,
}

#[derive(Debug)]
struct Shared {
    topic: String,
    block_len: usize,
    subscribers: Mutex<Vec<Subscriber>>,
    num_connections: AtomicUsize,
    published: AtomicU64,
    queue_full: AtomicU64,
    slow_subscriber: AtomicU64,
}

#[derive(Debug)]
struct Subscriber {
    id: u64,
    topics: Vec<Vec<u8>>,
    queue: SyncSender<Arc<Vec<u8>>>,
}

#[derive(Debug)]
struct Batch {
    number: u64,
    time: SystemTime,
    events: Vec<KvEvent>,
}

impl KvEventPublisher {
    /// Listens at an address. Each batch has `topic` as its first frame.
    pub fn bind(address: SocketAddr, topic: String, block_len: usize) -> io::Result<Arc<KvEventPublisher>> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            topic,
            block_len,
            subscribers: Mutex::default(),
            num_connections: AtomicUsize::new(0),
            published: AtomicU64::new(0),
            queue_full: AtomicU64::new(0),
            slow_subscriber: AtomicU64::new(0),
        });
        let (queue, batches) = sync_channel(MAX_QUEUED);
        let publishing = shared.clone();
        spawn(move || batches.iter().for_each(|batch: Batch| publishing.publish(&batch)))?;
        let accepting = Arc::downgrade(&shared);
        spawn(move || accept(&listener, &accepting))?;
        Ok(Arc::new(KvEventPublisher { address, shared, queue }))
    }

    /// Returns the address at which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the sink of an engine, whose first batch has number 0.
    pub fn sink(&self) -> Box<dyn KvEventSink> {
        Box::new(Sink { shared: self.shared.clone(), queue: self.queue.clone(), next: 0 })
    }
}

struct Sink {
    shared: Arc<Shared>,
    queue: SyncSender<Batch>,
    next: u64,
}

impl KvEventSink for Sink {
    fn send(&mut self, events: Vec<KvEvent>) {
        let batch = Batch { number: self.next, time: SystemTime::now(), events };
        self.next += 1;
        if self.queue.try_send(batch).is_err() {
            self.shared.queue_full.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name("kv-events".into()).spawn(work).map(drop)
}

/// Accepts subscribers for as long as there is a publisher.
fn accept(listener: &TcpListener, shared: &Weak<Shared>) {
    for (id, stream) in (0..).zip(listener.incoming()) {
        let Some(shared) = shared.upgrade() else { return };
        // Out of descriptors: those that are open are served.
        let Ok(stream) = stream else {
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        if shared.num_connections.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
            shared.num_connections.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let serving = shared.clone();
        let spawned = spawn(move || {
            if let Err(error) = serving.serve(id, stream) {
                tracing::debug!(%error, "a subscriber of KV events disconnected");
            }
            serving.lock().retain(|subscriber| subscriber.id != id);
            serving.num_connections.fetch_sub(1, Ordering::Relaxed);
        });
        if spawned.is_err() {
            shared.num_connections.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Vec<Subscriber>> {
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a subscriber until it disconnects.
    fn serve(&self, id: u64, mut stream: TcpStream) -> io::Result<()> {
        stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT))?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        stream.set_nodelay(true)?;
        zmtp::handshake(&mut stream)?;
        stream.set_read_timeout(None)?;
        let (queue, messages) = sync_channel(MAX_QUEUED);
        let writing = stream.try_clone()?;
        spawn(move || write(writing, &messages))?;
        self.lock().push(Subscriber { id, topics: Vec::new(), queue });
        loop {
            let incoming = zmtp::read(&mut stream)?;
            let mut subscribers = self.lock();
            let Some(subscriber) = subscribers.iter_mut().find(|subscriber| subscriber.id == id) else {
                return Ok(());
            };
            match incoming {
                Incoming::Subscribe(_) if subscriber.topics.len() >= MAX_TOPICS => return Ok(()),
                Incoming::Subscribe(topic) => subscriber.topics.push(topic),
                Incoming::Cancel(topic) => {
                    if let Some(i) = subscriber.topics.iter().position(|known| *known == topic) {
                        subscriber.topics.remove(i);
                    }
                }
                Incoming::Other => {}
            }
        }
    }

    /// Sends a batch to the subscribers of the topic.
    fn publish(&self, batch: &Batch) {
        let payload = self.payload(batch);
        let message = zmtp::message(&[self.topic.as_bytes(), &batch.number.to_be_bytes(), &payload]);
        let message = Arc::new(message);
        let is_wanted = |topic: &Vec<u8>| self.topic.as_bytes().starts_with(topic);
        for subscriber in self.lock().iter().filter(|subscriber| subscriber.topics.iter().any(is_wanted)) {
            if let Err(TrySendError::Full(_)) = subscriber.queue.try_send(message.clone()) {
                self.slow_subscriber.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.published.fetch_add(1, Ordering::Release);
    }

    /// Returns `[time, [events], rank]`. Events are maps with the names of vLLM; its older form, in which they are
    /// arrays, depends on their order.
    fn payload(&self, batch: &Batch) -> Vec<u8> {
        let mut out = MessagePack::default();
        out.array(3);
        out.float(batch.time.duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()));
        out.array(batch.events.len());
        for event in &batch.events {
            match event {
                KvEvent::Stored { hash, parent, tokens } => {
                    out.map(8);
                    out.text("type");
                    out.text("BlockStored");
                    out.text("block_hashes");
                    out.array(1);
                    out.uint(*hash);
                    out.text("parent_block_hash");
                    match parent {
                        Some(parent) => out.uint(*parent),
                        None => out.nil(),
                    }
                    out.text("token_ids");
                    out.array(tokens.len());
                    tokens.iter().for_each(|&token| out.uint(token.into()));
                    out.text("block_size");
                    out.uint(self.block_len as u64);
                    out.text("lora_id");
                    out.nil();
                    // The tier from which requests are served, as vLLM names it on every device.
                    out.text("medium");
                    out.text("GPU");
                    out.text("lora_name");
                    out.nil();
                }
                KvEvent::Removed { hash } => {
                    out.map(3);
                    out.text("type");
                    out.text("BlockRemoved");
                    out.text("block_hashes");
                    out.array(1);
                    out.uint(*hash);
                    out.text("medium");
                    out.text("GPU");
                }
            }
        }
        out.uint(0);
        out.0
    }
}

/// Writes the messages of one subscriber. One that accepts nothing for [`WRITE_TIMEOUT`] is disconnected.
fn write(mut stream: TcpStream, messages: &Receiver<Arc<Vec<u8>>>) {
    for message in messages {
        if stream.write_all(&message).is_err() {
            // Ends the thread that reads, which removes the subscriber.
            let _ = stream.shutdown(Shutdown::Both);
            return;
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

/// Exports the counts at the time of a scrape.
#[derive(Debug)]
pub(crate) struct KvEventCollector(pub(crate) Arc<KvEventPublisher>);

impl Collector for KvEventCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let shared = &self.0.shared;
        let count = |counter: &AtomicU64| ConstCounter::new(counter.load(Ordering::Relaxed));
        let gauge = ConstGauge::new(shared.lock().len() as f64);
        let help = "Subscribers of KV events";
        gauge.encode(encoder.encode_descriptor("pellucid_kv_event_subscribers", help, None, gauge.metric_type())?)?;
        let published = count(&shared.published);
        let (name, help) = ("pellucid_kv_event_batches", "Batches of KV events that were published");
        published.encode(encoder.encode_descriptor(name, help, None, published.metric_type())?)?;
        let dropped = [("queue_full", &shared.queue_full), ("slow_subscriber", &shared.slow_subscriber)];
        let dropped = dropped.map(|(reason, counter)| (reason, count(counter)));
        let (name, help) = ("pellucid_kv_event_batches_dropped", "Batches of KV events that were dropped, by reason");
        let mut family = encoder.encode_descriptor(name, help, None, dropped[0].1.metric_type())?;
        for (reason, counter) in dropped {
            counter.encode(family.encode_family(&ReasonLabels { reason })?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
