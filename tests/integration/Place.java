import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HexFormat;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicReference;

import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Writes a record for each key of a file, in hex, one a line, with Kafka's own producer and its default partitioner.
 * The value is the key's line number, so that a reader can tell the keys' partitions.
 *
 * Usage: java -cp "kafka/*" Place.java BOOTSTRAP TOPIC FILE
 */
class Place {
    public static void main(String[] arguments) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", arguments[0]);
        settings.put("acks", "all");
        List<String> keys = Files.readAllLines(Path.of(arguments[2]));
        AtomicReference<Exception> failure = new AtomicReference<>();
        ByteArraySerializer bytes = new ByteArraySerializer();
        try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(settings, bytes, bytes)) {
            for (int line = 0; line < keys.size(); line++) {
                byte[] key = HexFormat.of().parseHex(keys.get(line));
                byte[] value = Integer.toString(line).getBytes();
                producer.send(new ProducerRecord<>(arguments[1], key, value), (metadata, problem) -> {
                    if (problem != null) {
                        failure.compareAndSet(null, problem);
                    }
                });
            }
        }
        if (failure.get() != null) {
            throw failure.get();
        }
        System.out.println(keys.size() + " records written");
    }
}
