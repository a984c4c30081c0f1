//! Assembles a client's frames into text messages, answers pings, and refuses violations of the protocol. Knows no
//! connection: `socket` reads the bytes and writes the answers.

use std::sync::Arc;

use tokio::time::Instant;

use super::close_reason::CloseReason;
use super::frame::{self, FrameHead, Opcode};
use crate::limits::client_memory::{ClientMemory, HeldMemory, out_of_memory};
use crate::limits::rate_limit::RateLimit;
use crate::limits::tenants::Tenant;

/// While more bytes than this wait to be written, no further frame is processed.
pub(super) const PAUSE_BYTES: usize = 4 << 10;
/// Capacity with which a message begins; it doubles as bytes arrive.
const FIRST_BYTES: usize = 4 << 10;
/// Maximum control frames and empty fragments a minute. They cost time and carry nothing.
pub(super) const FRAMES_PER_MINUTE: u32 = 600;

/// A text message, with the memory that it holds.
#[derive(Debug)]
pub(crate) struct TextMessage {
    pub(crate) bytes: Vec<u8>,
    pub(crate) memory: HeldMemory,
}

/// Why [`Assembler::process`] returns.
#[derive(Debug)]
pub(super) enum Step {
    Message(TextMessage),
    /// The head of a message's first frame has arrived.
    Begun,
    NeedsInput,
    /// More than [`PAUSE_BYTES`] wait to be written.
    NeedsFlush,
}

/// Frames of one connection on their way to messages.
#[derive(Debug)]
pub(super) struct Assembler {
    memory: Arc<ClientMemory>,
    tenant: Arc<Tenant>,
    max_message: usize,
    frame: Option<OpenFrame>,
    /// Payload of the control frame that is arriving.
    control: Vec<u8>,
    unfinished: Option<Unfinished>,
    frames: RateLimit,
}

/// A frame of which the last byte has not arrived.
#[derive(Debug)]
struct OpenFrame {
    head: FrameHead,
    /// Bytes of the payload, which are within the limit.
    len: usize,
    /// Bytes of the payload that have arrived.
    received: usize,
}

/// A message of which the last byte has not arrived.
#[derive(Debug)]
struct Unfinished {
    message: TextMessage,
    began: Instant,
}

impl Assembler {
    /// Returns an assembler of messages with at most `max_message` bytes, which are taken from the memory of `tenant`.
    pub(super) fn new(memory: Arc<ClientMemory>, tenant: Arc<Tenant>, max_message: usize) -> Assembler {
        Assembler {
            memory,
            tenant,
            max_message,
            frame: None,
            control: Vec::new(),
            unfinished: None,
            frames: RateLimit::new(FRAMES_PER_MINUTE, std::time::Instant::now()),
        }
    }

    /// Returns an account of the tenant's memory that holds nothing.
    pub(super) fn account(&self) -> HeldMemory {
        HeldMemory::none(&self.memory, &self.tenant)
    }

    /// Applies another limit to messages that begin from now on.
    pub(super) fn set_max_message(&mut self, max_message: usize) {
        self.max_message = max_message;
    }

    /// Returns when the unfinished message began, if there is one.
    pub(super) fn began(&self) -> Option<Instant> {
        self.unfinished.as_ref().map(|unfinished| unfinished.began)
    }

    /// Counts the time of the unfinished message from now on if none of its bytes was read; returns whether it does.
    pub(super) fn restart_clock(&mut self) -> bool {
        match &mut self.unfinished {
            Some(Unfinished { message, began }) if message.bytes.is_empty() => {
                *began = Instant::now();
                true
            }
            _ => false,
        }
    }

    /// Drops the unfinished message with its memory.
    pub(super) fn discard(&mut self) {
        self.unfinished = None;
    }

    /// Processes `input` until a message is complete or begins, or something is missing. Takes what it has processed
    /// from the start of `input`, and appends answers to `output`.
    pub(super) fn process(&mut self, input: &mut &[u8], output: &mut Vec<u8>) -> Result<Step, CloseReason> {
        loop {
            if output.len() >= PAUSE_BYTES {
                return Ok(Step::NeedsFlush);
            }
            match &mut self.frame {
                None => {
                    let was_idle = self.unfinished.is_none();
                    if !self.open_frame(input)? {
                        return Ok(Step::NeedsInput);
                    }
                    if was_idle && self.unfinished.is_some() {
                        return Ok(Step::Begun);
                    }
                }
                Some(_) => {
                    let Some(head) = self.read_payload(input)? else { return Ok(Step::NeedsInput) };
                    if let Some(message) = self.close_frame(head, output)? {
                        return Ok(Step::Message(message));
                    }
                }
            }
        }
    }

    /// Reads the head of the next frame; `false` if more input is needed.
    fn open_frame(&mut self, input: &mut &[u8]) -> Result<bool, CloseReason> {
        let Some((head, head_len)) = FrameHead::read(input).map_err(CloseReason::Protocol)? else { return Ok(false) };
        if head.opcode.is_control() || head.len == 0 {
            if self.frames.wait_s(std::time::Instant::now()).is_some() {
                return Err(CloseReason::TooManyFrames);
            }
            self.frames.charge(1);
        }
        match (head.opcode, &self.unfinished) {
            (Opcode::Binary, _) => return Err(CloseReason::Binary),
            (Opcode::Text, Some(_)) => return Err(CloseReason::Protocol("a message began inside another")),
            (Opcode::Continuation, None) => return Err(CloseReason::Protocol("no message to continue")),
            _ => {}
        }
        let before = match &self.unfinished {
            Some(unfinished) if !head.opcode.is_control() => unfinished.message.bytes.len(),
            _ => 0,
        };
        let limit = self.max_message;
        let len = usize::try_from(head.len)
            .ok()
            .filter(|len| head.opcode.is_control() || *len <= limit.saturating_sub(before));
        let len = len.ok_or(CloseReason::TooLarge(limit))?;
        if head.opcode == Opcode::Text {
            let message = TextMessage { bytes: Vec::new(), memory: self.account() };
            self.unfinished = Some(Unfinished { message, began: Instant::now() });
        }
        self.frame = Some(OpenFrame { head, len, received: 0 });
        *input = &input[head_len..];
        Ok(true)
    }

    /// Reads the payload of the open frame; returns its head when the payload is complete.
    fn read_payload(&mut self, input: &mut &[u8]) -> Result<Option<FrameHead>, CloseReason> {
        let Some(frame) = &mut self.frame else { return Ok(None) };
        let (part, rest) = input.split_at(input.len().min(frame.len - frame.received));
        let target = match &mut self.unfinished {
            Some(Unfinished { message, .. }) if !frame.head.opcode.is_control() => {
                message.reserve(part.len(), self.max_message)?;
                &mut message.bytes
            }
            _ => &mut self.control,
        };
        let at = target.len();
        target.extend_from_slice(part);
        frame::unmask(&mut target[at..], frame.head.mask, frame.received);
        frame.received += part.len();
        *input = rest;
        if frame.received < frame.len {
            return Ok(None);
        }
        Ok(self.frame.take().map(|frame| frame.head))
    }

    /// Applies a frame whose payload is complete; returns the message that it completes.
    fn close_frame(&mut self, head: FrameHead, output: &mut Vec<u8>) -> Result<Option<TextMessage>, CloseReason> {
        if head.opcode.is_control() {
            let payload = std::mem::take(&mut self.control);
            match head.opcode {
                Opcode::Ping => frame::write(Opcode::Pong, &payload, output),
                Opcode::Close => return Err(frame::read_close(&payload)),
                _ => {}
            }
            return Ok(None);
        }
        let Some(Unfinished { message, .. }) = self.unfinished.take_if(|_| head.is_final) else { return Ok(None) };
        match std::str::from_utf8(&message.bytes) {
            Ok(_) => Ok(Some(message)),
            Err(_) => Err(CloseReason::NotUtf8),
        }
    }
}

impl TextMessage {
    /// Takes memory for `more` bytes, in steps that double up to `limit`.
    fn reserve(&mut self, more: usize, limit: usize) -> Result<(), CloseReason> {
        let (len, capacity) = (self.bytes.len(), self.bytes.capacity());
        let needed = len + more;
        if needed <= capacity {
            return Ok(());
        }
        let target = capacity.saturating_mul(2).max(FIRST_BYTES).min(limit).max(needed);
        self.memory.grow_to(target)?;
        self.bytes.try_reserve_exact(target - len).map_err(|_| out_of_memory())?;
        Ok(())
    }
}
